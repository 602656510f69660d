"""replace-norm: RMSNorm for LayerNorm and back."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, WeftError, interpret, ops
from weft.ir.recipes.readers import Array
from weft.passes import parse_pipeline, run_passes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck, measure_difference

from ...models import Tiny, applied, count, weight
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO
from ..norms import FEED


def formula(kind: str, x: Array, g: Array, b: Array | float, eps: float) -> Array:
    rows = [r - sum(r) / len(r) if kind == "layer" else r for r in x.reshape(-1, x.shape[-1])]
    return np.stack([r / np.sqrt(sum(r * r) / len(r) + eps) * g + b for r in rows]).reshape(x.shape)


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("eps", [None, 0.25])
def test_replaced_norms_are_the_formula(kind: str, eps: float | None) -> None:
    g = Graph("norms")
    x, y = g.add_input("x", FEED), g.add_input("y", FEED)
    gain, beta = weight(g, "g", 6), weight(g, "b", 6)
    g.add_output("rms", ops.rms_norm(x, gain, eps=0.1))
    g.add_output("layer", ops.layer_norm(x, gain, beta, eps=0.1))
    normed, total = ops.add_norm.emit(x, y, gain, beta, kind="layer", eps=0.1)
    g.add_output("fused", normed)
    g.add_output("sum", total)
    option = "" if eps is None else f", eps={eps}"
    after = run_passes(g, f"replace-norm{{kind={kind}{option}}}", verify=True)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 4, 3, 6))
    scale, shift = (g.params[n].recipe.evaluate(g.reader).astype(float) for n in "gb")
    found = interpret(after, {"x": a, "y": b})
    e = 0.1 if eps is None else eps
    wanted = {
        "rms": formula(kind, a, scale, 0.0, e),
        "layer": formula(kind, a, scale, shift, e),
        "fused": formula(kind, a + b, scale, shift, e),
        "sum": a + b,
    }
    assert max(measure_difference(wanted[n], found[n]) for n in wanted) <= EXACT
    assert applied(f"replace-norm{{kind={kind}{option}}}", after) == after


@pytest.mark.parametrize(
    "name", ["family/gpt2-tied", "family/qwen3-gqa", "packed/family bert", "cached/variant hybrid"]
)
def test_models_with_another_norm(name: str) -> None:
    before = ZOO[name]()
    for kind, gone in (("rms", "layer_norm"), ("layer", "rms_norm")):
        after = run_passes(before, f"replace-norm{{kind={kind}}}", verify=True)
        assert count(after, gone) == 0
        assert {n.attrs["kind"] for n in after.nodes if n.op is ops.add_norm} <= {kind}
        assert set(after.params) == set(before.params)


def test_its_check_notices_a_wrong_replacement() -> None:
    (replace,) = parse_pipeline("replace-norm{kind=layer}").passes
    before = Tiny().graph()
    after = applied("replace-norm{kind=layer}", before)
    replace.check(before, after, EquivalenceCheck())
    for wrong in (before, applied("replace-norm{kind=layer, eps=0.1}", before)):
        with pytest.raises(WeftError, match="output logits differs"):
            replace.check(before, wrong, EquivalenceCheck())


def test_replacing_refuses() -> None:
    fused = applied("fuse-norm-linear", Tiny().graph())
    with pytest.raises(WeftError, match=r"%layers\.0\.attn\.q is fused; run replace-norm before fuse-norm-linear"):
        applied("replace-norm{kind=layer}", fused)
    with pytest.raises(WeftError, match=r"eps=-1\.0 must not be negative"):
        applied("replace-norm{kind=rms, eps=-1.0}", Tiny().graph())

"""replace-norm, fold-embedding-norm, drop-double-norm, unfuse-residual-norm."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, Param, TensorType, WeftError, interpret, ops, verify
from weft.ir.recipes.matrices import RowNorm
from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes, sizes
from weft.passes import Trace, parse_pipeline, run_passes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck, measure_difference
from weft.passes.edits.edit import replace_uses

from ...models import Tiny, applied, count, weight, worst
from ...zoo import ZOO

FEED = TensorType(dtypes.f32, (sizes.sym("n"), 3, 6))


def reasons(trace: Trace) -> list[str]:
    return [refused.reason for refused in trace.refusals]


# -- replace-norm


def formula(kind: str, x: Array, g: Array, b: Array | float, eps: float) -> Array:
    rows = [r - sum(r) / len(r) if kind == "layer" else r for r in x.reshape(-1, x.shape[-1])]
    return np.stack([r / np.sqrt(sum(r * r) / len(r) + eps) * g + b for r in rows]).reshape(x.shape)


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


# -- fold-embedding-norm


@pytest.mark.parametrize("name", ["family/bloom", "variant/embedding norm"])
def test_the_norm_of_an_embedding_goes_into_the_table(name: str) -> None:
    before = ZOO[name]()
    after = applied("fold-embedding-norm{untie=true}", before)
    kinds = ("rms_norm", "layer_norm")
    assert sum(count(after, k) for k in kinds) == sum(count(before, k) for k in kinds) - 1
    table = next(n for n in after.nodes if n.op is ops.embedding).inputs[1]
    assert isinstance(table, Param) and isinstance(table.recipe, RowNorm)
    assert worst(before, after) <= EXACT


def test_bloom_becomes_rms_once_its_embedding_norm_is_folded() -> None:
    before = ZOO["family/bloom"]()
    after = applied("fold-embedding-norm{untie=true}, layernorm-to-rmsnorm", before)
    assert count(after, "layer_norm") == 0 and worst(before, after) <= EXACT


def test_embedding_norms_that_stay() -> None:
    for name, reason in {
        "family/bloom": "%embed.weight is shared with linear (%lm_head); untie=true copies it",
        "family/bert": "%positions_added is not a looked-up row: add is between",
        "family/llama-gqa-tied": "%embed is also read by add (%layers.0.attn_residual)",
    }.items():
        trace = Trace()
        assert applied("fold-embedding-norm", ZOO[name](), trace) == ZOO[name]()
        assert reasons(trace) == [reason]


def test_why_positions_are_in_the_way() -> None:
    """norm(E[i] + P[j]) is not norm(E)[i] + norm(P)[j]."""
    graph = ZOO["family/bert"]()
    wrong = graph.clone()
    norm = next(n for n in wrong.nodes if n.output.name == "embed_norm")
    for node in [n for n in wrong.nodes if n.op is ops.embedding]:
        table, gain, bias = node.inputs[1], *norm.inputs[1:]
        assert isinstance(table, Param) and isinstance(gain, Param) and isinstance(bias, Param)
        table.recipe = RowNorm(table.recipe, "layer", norm.attrs["eps"], gain.recipe, bias.recipe)
    assert norm.inputs[0] is not None
    replace_uses(norm.output, norm.inputs[0], rename=False)
    assert worst(graph, wrong) > 1e-2


# -- drop-double-norm


def double(eps: float, bias: bool = False, second: str = "rms_norm") -> Graph:
    """Norm, linear, heads, rotation, norm: as queries with a norm of their own have it."""
    g = Graph("double")
    x = g.add_input("x", FEED)
    at = g.add_input("at", TensorType(dtypes.i64, (sizes.sym("n"), 3)))
    first = ops.rms_norm(x, eps=1e-6, name="first")
    y = ops.linear(first, weight(g, "q.weight", 8, 6), weight(g, "q.bias", 8) if bias else None)
    y = ops.rope(y, at, weight(g, "frequencies", 2), heads=2)
    y = ops.reshape(ops.affine(y, by=0.5), shape=(sizes.sym("n"), 3, 2, 4))
    g.add_output("y", getattr(ops, second)(y, weight(g, "g", 4), eps=eps, name="second"))
    return g


@pytest.mark.parametrize("second", ["rms_norm", "layer_norm"])
def test_an_idle_norm_goes(second: str) -> None:
    before = double(0.0, second=second)
    after = applied("drop-double-norm", before)
    assert count(after, "rms_norm") == (second == "rms_norm") and worst(before, after) <= EXACT


def without_first(graph: Graph) -> Graph:
    wrong = graph.clone()
    first = next(n for n in wrong.nodes if n.output.name == "first")
    assert first.inputs[0] is not None
    replace_uses(first.output, first.inputs[0], rename=False)
    verify(wrong)
    return wrong


@pytest.mark.parametrize(
    ("graph", "reason", "low", "high"),
    [
        (double(1e-6), "%second has eps=1e-06, which is not negligible for rows of this size", 1e-9, 1e-4),
        (double(1e-2), "%second has eps=0.01, which is not negligible for rows of this size", 1e-4, 1.0),
        (double(0.0, bias=True), "", 1e-3, 10.0),  # the scale does not get through to the second norm
    ],
    ids=["eps", "large eps", "bias"],
)
def test_a_norm_that_still_counts_stays(graph: Graph, reason: str, low: float, high: float) -> None:
    trace = Trace()
    assert applied("drop-double-norm", graph, trace) == graph
    assert low < worst(graph, without_first(graph)) < high
    assert reasons(trace) == ([reason] if reason else [])


def test_a_value_without_a_norm_keeps_it() -> None:
    """Queries and keys are normed again, values are not."""
    trace = Trace()
    applied("drop-double-norm", Tiny(qk_norm=True, rope=False).graph(), trace)
    assert reasons(trace)[0] == "its scale reaches attention (%layers.0.attn.attention) without a norm that removes it"


def test_a_weight_is_folded_first() -> None:
    g = Graph("weighted")
    x = g.add_input("x", FEED)
    y = ops.linear(ops.rms_norm(x, weight(g, "g", 6)), weight(g, "w", 5, 6))
    g.add_output("y", ops.rms_norm(y, eps=0.0))
    trace = Trace()
    applied("drop-double-norm", g, trace)
    assert reasons(trace) == ["it has a weight; run fold-norm-scale before"]
    after = applied("fold-norm-scale, drop-double-norm", g)
    assert count(after, "rms_norm") == 1 and worst(g, after) <= EXACT


# -- unfuse-residual-norm


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_residual_norms_come_apart_again(norm: str) -> None:
    before = Tiny(norm=norm).graph()
    after = applied("fuse-residual-norm, unfuse-residual-norm", before)
    assert {op: count(after, op) for op in ("add", "rms_norm", "layer_norm", "add_norm")} == {
        op: count(before, op) for op in ("add", "rms_norm", "layer_norm", "add_norm")
    }
    assert worst(before, after) <= EXACT
    assert {n.output.name: n.scope for n in after.nodes} == {n.output.name: n.scope for n in before.nodes}


def test_sums_without_a_scope_in_their_names_stay_with_the_norm() -> None:
    g = Graph("g")
    x = g.add_input("x", FEED)
    with g.scope("layer"):
        y = ops.neg(x)
    with g.scope("other"):
        normed, total = ops.add_norm.emit(x, y)
    g.add_output("normed", normed)
    g.add_output("total", total)
    after = applied("unfuse-residual-norm", g)
    assert [(n.op.name, n.scope) for n in after.nodes] == [("neg", "layer"), ("add", "other"), ("rms_norm", "other")]

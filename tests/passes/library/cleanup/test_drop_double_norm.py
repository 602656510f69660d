"""drop-double-norm: an RMSNorm that a later norm makes redundant goes."""

from __future__ import annotations

import pytest

from weft.ir import Graph, TensorType, ops, verify
from weft.ir.types import dtypes, sizes
from weft.passes import Trace
from weft.passes.core.equivalence import EXACT
from weft.passes.edits.edit import replace_uses

from ...models import Tiny, applied, count, weight, worst
from ...rewrites import Rewrite, rewrites
from ..norms import FEED, reasons


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


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("second", ["rms_norm", "layer_norm"])
def test_redundant_norm_is_removed(second: str) -> None:
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
def test_norm_with_eps_or_bias_after_it_stays(graph: Graph, reason: str, low: float, high: float) -> None:
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

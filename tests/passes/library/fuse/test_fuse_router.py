"""fuse-router: which spellings of a top-k router are the same, and which only look alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft.ir import Graph, TensorType, Value, ops
from weft.ir.types import dtypes
from weft.passes import Trace
from weft.passes.core.equivalence import EXACT

from ...models import BATCH, SEQ, applied, weight, worst
from ...rewrites import Rewrite, rewrites

Weigh = Callable[[Value], tuple[Value, Value]]


def renormalized(x: Value) -> Value:
    return ops.div(x, ops.sum(x, axes=(-1,), keepdims=True))


def chosen(x: Value, after: Callable[[Value], Value]) -> tuple[Value, Value]:
    """The three largest of x, weighed by `after`, and where they are."""
    best, indices = ops.top_k.emit(x, k=3)
    return after(best), indices


SPELLINGS: dict[str, tuple[Weigh, dict[str, object]]] = {
    "softmax(topk)": (lambda x: chosen(x, ops.softmax), {}),
    "renorm(topk(softmax))": (lambda x: chosen(ops.softmax(x), renormalized), {}),
    "topk(softmax)": (lambda x: chosen(ops.softmax(x), lambda b: b), {"renormalize": False}),
    "renorm(topk(sigmoid))": (lambda x: chosen(ops.sigmoid(x), renormalized), {"scoring": "sigmoid"}),
    "topk(sigmoid)": (lambda x: chosen(ops.sigmoid(x), lambda b: b), {"scoring": "sigmoid", "renormalize": False}),
    "sigmoid(topk)": (lambda x: chosen(x, ops.sigmoid), {"scoring": "sigmoid", "renormalize": False}),
}


def spelled(weigh: Weigh, depth: int = 5) -> Graph:
    """Experts behind a router that is written out."""
    g = Graph("router")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 6)))
    weights, indices = weigh(ops.linear(x, weight(g, "router", 5, 6)))
    placed = ops.mul(ops.unsqueeze(weights, axes=(3,)), ops.one_hot(indices, depth=depth))
    combine = ops.sum(placed, axes=(2,))
    g.add_output("y", ops.moe(x, combine, weight(g, "up", depth, 4, 6), weight(g, "down", depth, 6, 4)))
    return g


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_one_op(name: str) -> None:
    weigh, settings = SPELLINGS[name]
    before = spelled(weigh)
    after = applied("fuse-router", before)
    route = next(n for n in after.nodes if n.op is ops.route)
    assert {k: v for k, v in route.attrs.items() if v != route.op.attrs[k].default} == {"k": 3, **settings}
    assert [n.op.name for n in after.nodes] == ["linear", "route", "moe"] and worst(before, after) <= EXACT


def test_sigmoid_scores_are_not_a_softmax() -> None:
    """The identity of softmax would change a router with sigmoid scores."""
    plain, divided = (spelled(SPELLINGS[n][0]) for n in ("sigmoid(topk)", "renorm(topk(sigmoid))"))
    softmax = spelled(SPELLINGS["softmax(topk)"][0])
    assert worst(plain, divided) > 0.1 and worst(plain, softmax) > 0.1 and worst(divided, softmax) > 0.01


def corrected(x: Value) -> tuple[Value, Value]:
    """Chosen by other numbers than those that are weighed: both sorted, so that weights go to the wrong experts."""
    _, indices = ops.top_k.emit(ops.neg(x), k=3)
    best, _ = ops.top_k.emit(x, k=3)
    return ops.softmax(best), indices


def test_indices_of_other_scores_are_not_fused() -> None:
    before, trace = spelled(corrected), Trace()
    assert str(applied("fuse-router", before, trace)) == str(before)
    assert any("is made by a second top_k" in line or "is made by neg" in line for line in trace.lines)
    assert worst(before, spelled(SPELLINGS["softmax(topk)"][0])) > 0.1


def test_other_axes_and_depths_are_refused() -> None:
    tokens = spelled(lambda x: chosen(x, lambda b: ops.softmax(b, axis=1)))
    trace = Trace()
    assert str(applied("fuse-router", tokens, trace)) == str(tokens)
    assert any("along other axes" in line for line in trace.lines)
    assert worst(tokens, spelled(SPELLINGS["softmax(topk)"][0])) > 0.1
    more, trace = spelled(SPELLINGS["softmax(topk)"][0], depth=7), Trace()
    assert str(applied("fuse-router", more, trace)) == str(more)
    assert any("among 7 experts, with logits of 5" in line for line in trace.lines)

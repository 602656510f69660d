"""permute-heads: heads in another order, with everything that belongs to a head."""

from __future__ import annotations

import pytest

from weft.ir import Graph, TensorType, WeftError, ops
from weft.ir.types import dtypes
from weft.passes import Trace, lookup
from weft.passes.core.equivalence import EXACT

from ...models import BATCH, SEQ, Tiny, applied, weight, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO
from .head_graphs import GRAPHS, attentions, check_exact_and_idempotent, check_refused, rows_taken

REVERSED = "permute-heads{{order={}}}"


def backwards(graph: Graph) -> str:
    """The pipeline that turns the order of heads around."""
    heads = {int(str(a["heads"])) for a in attentions(graph)}
    return ", ".join(REVERSED.format(list(range(n))[::-1]) for n in sorted(heads))


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("name", GRAPHS)
def test_permute_keeps_outputs(name: str) -> None:
    before = ZOO[name]()
    after = check_exact_and_idempotent(before, backwards(before))
    assert len(after.params) == len(before.params) and str(after) != str(before)


@pytest.mark.parametrize(
    ("pipeline", "name", "reason"),
    [
        ("permute-heads{order=[1, 0]}", "variant/grouped", "it has 6 heads, the order 2"),
        ("permute-heads{order=[3, 1, 2, 0, 4, 5]}", "variant/grouped", "heads of its groups of 3 would be separated"),
        ("permute-heads{order=[2, 1, 0]}", "variant/latent", "its keys are its values too"),
        ("permute-heads{order=[0, 1, 2, 5, 4, 3]}", "variant/gate", "the result is read by mul, not by one linear"),
    ],
)
def test_permute_refuses(pipeline: str, name: str, reason: str) -> None:
    check_refused(pipeline, name, reason)


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        ("permute-heads{order=[0, 0]}", r"order=\[0, 0\] must have each head, counted from 0, exactly once"),
    ],
)
def test_permute_rejects_arguments(pipeline: str, reason: str) -> None:
    with pytest.raises(WeftError, match=reason):
        applied(pipeline, Tiny().graph())


@pytest.mark.parametrize(("order", "parts"), [((5, 4, 3, 2, 1, 0), False), ((3, 1, 2, 0, 4, 5), True)])
def test_groups_stay_together(order: tuple[int, ...], parts: bool) -> None:
    graph = Tiny(layers=1).graph()
    by_hand = graph.clone()
    rows_taken(by_hand, "layers.0.attn.q.weight", order)
    rows_taken(by_hand, "layers.0.attn.o.weight", order, axis=1)
    for part in "kv":
        rows_taken(by_hand, f"layers.0.attn.{part}.weight", (order[0] // 3, order[3] // 3))
    assert worst(graph, by_hand) > 0.01 if parts else worst(graph, by_hand) <= EXACT


@pytest.mark.parametrize("forgotten", ["slopes", "sinks", "bias"])
def test_slopes_and_sinks_move_with_their_heads(forgotten: str) -> None:
    g = Graph("one")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 7)))
    at = ops.unsqueeze(ops.iota(x, axis=1), axes=(0,))
    bias = ops.alibi(weight(g, "slopes", 4), at, at) if forgotten == "slopes" else None
    if forgotten == "bias":
        bias = weight(g, "bias", 1, 4, 1, 1)
        bias = ops.mul(bias, ops.cast(ops.iota(x, axis=1), to=dtypes.f32))
    sinks = weight(g, "sinks", 4) if forgotten == "sinks" else None
    q, k, v = (ops.linear(x, weight(g, f"{n}.weight", 8, 7), name=n) for n in "qkv")
    y = ops.attention(q, k, v, bias, None, sinks, heads=4, kv_heads=4, causal=True)
    g.add_output("y", ops.linear(y, weight(g, "o.weight", 3, 8)))
    by_hand, trace = g.clone(), Trace()
    for name in "qkv":
        rows_taken(by_hand, f"{name}.weight", (3, 1, 2, 0), width=2)
    rows_taken(by_hand, "o.weight", (3, 1, 2, 0), axis=1, width=2)
    assert worst(g, by_hand) > 1e-4
    after = applied("permute-heads{order=[3, 1, 2, 0]}", g, trace)
    if forgotten == "bias":
        assert "its bias %mul is computed, head by head" in trace.refusals[0].reason
    else:
        assert trace.rewrites and worst(g, after) <= EXACT


def test_permute_has_no_tradeoff() -> None:
    assert not lookup("permute-heads").tradeoff

"""fuse-glu: products of an activated and a plain projection become `glu`."""

from __future__ import annotations

import pytest

from weft.ir import Graph, Value, ops
from weft.passes import Trace
from weft.passes.analysis.feed_forward import FeedForward, match_feed_forward
from weft.passes.core.equivalence import EXACT

from ...gated import HIDDEN, UNITS, clamped, unit
from ...models import applied, count, weight, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("packed", [False, True], ids=["two linears", "split"])
@pytest.mark.parametrize("name", UNITS)
def test_gated_units_of_every_activation_are_recognized(name: str, packed: bool) -> None:
    before = unit(UNITS[name], packed)
    after = applied("fuse-glu", before)
    (glu,) = [n for n in after.nodes if n.op is ops.glu]
    assert glu.attrs["activation"] == name.partition(",")[0]
    assert (glu.attrs["limit"], glu.attrs["shift"]) == ((0.7, 1.0) if UNITS[name] is clamped else (None, 0.0))
    assert len(after) == 4 and worst(before, after) <= EXACT
    assert isinstance(match_feed_forward(list(after.nodes)[-1]), FeedForward)


def test_fused_gate_and_up_can_be_packed() -> None:
    after = applied("fuse-glu, pack-gate-up", ZOO["variant/hand-written gate"]())
    assert count(after, "glu") == count(after, "split") == 2


def test_products_of_other_values_are_not_fused() -> None:
    trace = Trace()
    before = unit(UNITS["silu"], same=False)
    assert str(applied("fuse-glu", before, trace)) == str(before)
    assert "are not projections of the same value" in trace.refusals[0].reason
    for name in ("variant/gate", "variant/Mamba"):
        before, trace = ZOO[name](), Trace()
        assert str(applied("fuse-glu", before, trace)) == str(before) and len(trace.refusals) == 2
    own = Graph("silu")  # x σ(x) alone is an activation, not a unit of x with itself
    x = own.add_input("x", HIDDEN)
    y = ops.linear(x, weight(own, "w", 6, 6))
    own.add_output("y", ops.mul(y, ops.sigmoid(y)))
    assert str(applied("fuse-glu", own)) == str(own)


def test_gate_clamped_on_both_sides_is_not_fused() -> None:
    def both(a: Value, b: Value) -> Value:
        return ops.mul(ops.swish(ops.clip(a, low=-0.7, high=0.7)), ops.clip(b, low=-0.7, high=0.7))

    before, trace = unit(both), Trace()
    assert str(applied("fuse-glu", before, trace)) == str(before) and "its clamps are not" in str(trace.refusals[0])
    wrong = unit(lambda a, b: ops.glu(a, b, limit=0.7))
    assert worst(before, wrong) > 0.01


def test_activation_with_other_readers_is_not_fused() -> None:
    before, trace = unit(UNITS["silu"]), Trace()
    before.add_output("opened", next(n.output for n in before.nodes if n.op is ops.swish))
    assert str(applied("fuse-glu", before, trace)) == str(before)
    assert "%swish is also read elsewhere" in trace.refusals[0].reason

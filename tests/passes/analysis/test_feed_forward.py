"""Feed-forwards of a graph: matched, plain or gated, also with a fused norm."""

from __future__ import annotations

import pytest

from weft.ir import parse
from weft.passes import Trace, run_passes
from weft.passes.analysis.feed_forward import FeedForward, match_feed_forward

from ..models import applied, count
from ..zoo import ZOO


def test_feed_forwards_with_fused_norms() -> None:
    """Gates are seen through them; what would have to read the normed value is not."""
    fused = run_passes(ZOO["variant/hand-written gate"](), "fold-norm-scale, fuse-norm-linear")
    assert count(fused, "norm_linear") and count(applied("fuse-glu", fused), "glu") == 2
    relu = run_passes(fused, "replace-activation{to=relu}, permute-neurons, fold-scale", verify=True)
    assert count(relu, "glu") == 2
    trace = Trace()
    assert not count(applied("upcycle-to-moe{experts=3}", fused, trace), "moe")
    assert {r.reason for r in trace.refusals} == {
        "its norm is fused into it: run upcycle-to-moe before fuse-norm-linear"
    }


HEAD = """graph g {
  input %x: f32[batch, seq, 4]
  param %wg: f32[6, 4] = normal([6, 4], std=0.5, stream="g")
  param %wu: f32[6, 4] = normal([6, 4], std=0.5, stream="u")
  param %wd: f32[4, 6] = normal([4, 6], std=0.5, stream="d")
  param %both: f32[12, 4] = normal([12, 4], std=0.5, stream="b")
"""
GATED = "%gate: f32[batch, seq, 6] = linear(%x, %wg) %up: f32[batch, seq, 6] = linear(%x, %wu) "
PACKED = (
    "%gu: f32[batch, seq, 12] = linear(%x, %both) "
    "%gate: f32[batch, seq, 6], %up: f32[batch, seq, 6] = split(%gu, sizes=[6, 6]) "
)
DOWN = "%y: f32[batch, seq, 4] = linear(%h, %wd) output y = %y }"


def match(body: str) -> FeedForward | str | None:
    *_, down = (n for n in parse(f"{HEAD}{body}{DOWN}").nodes if n.output.name == "y")
    return match_feed_forward(down)


@pytest.mark.parametrize("projections", [GATED, PACKED], ids=["two linears", "packed"])
def test_gated_feed_forward_has_up_gate_and_down(projections: str) -> None:
    found = match(f'{projections}%h: f32[batch, seq, 6] = glu(%gate, %up, activation="gelu") ')
    assert isinstance(found, FeedForward) and found.gate is not None
    assert (found.activation, found.hidden, found.x.name) == ("gelu", 6, "x")
    start = 6 if projections == PACKED else 0
    assert (found.up.start, found.up.stop, found.up.is_packed) == (start, start + 6, projections == PACKED)
    assert [p.name for p in found.params] == (["both", "wd"] if projections == PACKED else ["wu", "wg", "wd"])


@pytest.mark.parametrize(
    ("body", "activation"),
    [
        ("%h: f32[batch, seq, 6] = tanh(%up) ", "tanh"),
        ("%r: f32[batch, seq, 6] = relu(%up) %h: f32[batch, seq, 6] = square(%r) ", "relu2"),
        ("%s: f32[batch, seq, 6] = sigmoid(%up) %h: f32[batch, seq, 6] = mul(%s, %up) ", "silu"),
        (
            "%a: f32[batch, seq, 6] = affine(%up, by=1.5) %s: f32[batch, seq, 6] = sigmoid(%a) "
            "%h: f32[batch, seq, 6] = mul(%up, %s) ",
            "swish(1.5)",
        ),
    ],
)
def test_activation_in_several_ops_matches(body: str, activation: str) -> None:
    found = match(f"%up: f32[batch, seq, 6] = linear(%x, %wu) {body}")
    assert isinstance(found, FeedForward) and found.gate is None and found.activation == activation


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("%up: f32[batch, seq, 6] = linear(%x, %wu) %h: f32[batch, seq, 6] = softmax(%up) ", None),
        ("%up: f32[batch, seq, 6] = matmul(%x, %wd) %h: f32[batch, seq, 6] = relu(%up) ", None),
        (
            "%up: f32[batch, seq, 6] = linear(%x, %wu) %h: f32[batch, seq, 6] = relu(%up) output h = %h ",
            "%h is read by the caller too",
        ),
        (
            "%up: f32[batch, seq, 6] = linear(%x, %wu) %h: f32[batch, seq, 6] = relu(%up) "
            "%e: f32[batch, seq, 6] = exp(%up) output e = %e ",
            "%up is read by exp too",
        ),
    ],
)
def test_other_values_before_a_linear_are_no_feed_forward(body: str, result: str | None) -> None:
    assert match(body) == result

"""fuse-residual-norm: a sum and the norm after it become add_norm."""

from __future__ import annotations

import pytest

from weft.ir import Graph, ops
from weft.passes import Trace
from weft.passes.core.equivalence import EXACT

from ...models import Tiny, applied, count, weight, worst
from ...rewrites import Rewrite, rewrites
from ..norms import FEED
from .hidden import HIDDEN


def residual(step: str) -> Graph:
    g = Graph(step)
    x, y = g.add_input("x", HIDDEN), g.add_input("y", HIDDEN)
    s = ops.add(x, y, name="sum")
    if step == "divided":
        s = ops.affine(s, by=0.5, name="halved")
    if step == "broadcast":
        s = ops.add(x, weight(g, "p", 10), name="sum")
    out = ops.rms_norm(s, weight(g, "w", 10), eps=1e-3, name="norm")
    if step == "read before":
        out = ops.mul(out, ops.exp(s))
    if step == "two norms":
        out = ops.add(out, ops.rms_norm(s, weight(g, "v", 10), name="second"))
    if step in ("read after", "output"):
        out = ops.mul(out, s)
    g.add_output("out", out)
    if step == "output":
        g.add_output("sum", s)
    return g


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("step", ["alone", "read before", "read after", "two norms", "output"])
def test_sums_read_elsewhere_come_from_the_second_output(step: str) -> None:
    before, trace = residual(step), Trace()
    after = applied("fuse-residual-norm", before, trace)
    assert trace.rewrites == {"fuse-residual-rms-norm": 1}
    fused = next(n for n in after.nodes if n.op is ops.add_norm)
    assert [v.name for v in fused.outputs] == ["norm", "sum"] and fused.attrs["eps"] == 1e-3
    assert worst(before, after) <= EXACT


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("divided", "%halved, is made by affine, not by add (affine is between it and add)"),
        ("broadcast", "%x and %p are of types f32[n, 3, 10] and f32[10]"),
    ],
)
def test_fusion_that_never_fires_reports_its_nearest_miss(step: str, reason: str) -> None:
    trace = Trace()
    applied("fuse-residual-norm", residual(step), trace)
    (line,) = trace.lines
    assert line.startswith("fuse-residual-rms-norm: fired 0 times; nearest miss at rms_norm (%norm)") and reason in line


@pytest.mark.parametrize("operands", ["", "w", "wb"])
def test_layer_norms_with_and_without_weight_and_bias(operands: str) -> None:
    g = Graph("layer")
    x, y = g.add_input("x", HIDDEN), g.add_input("y", HIDDEN)
    g.add_output("y", ops.layer_norm(ops.add(x, y), *(weight(g, n, 10) for n in operands), eps=1e-2))
    after = applied("fuse-residual-norm", g)
    assert [n.op.name for n in after.nodes] == ["add_norm"] and worst(g, after) <= EXACT


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_unfusing_restores_sums_and_norms(norm: str) -> None:
    before = Tiny(norm=norm).graph()
    after = applied("fuse-residual-norm, unfuse-residual-norm", before)
    assert {op: count(after, op) for op in ("add", "rms_norm", "layer_norm", "add_norm")} == {
        op: count(before, op) for op in ("add", "rms_norm", "layer_norm", "add_norm")
    }
    assert worst(before, after) <= EXACT
    assert {n.output.name: n.scope for n in after.nodes} == {n.output.name: n.scope for n in before.nodes}


def test_sum_without_scope_takes_the_scope_of_the_norm() -> None:
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

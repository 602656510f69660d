"""unfuse-residual-norm: add_norm becomes a sum and a norm."""

from __future__ import annotations

import pytest

from weft.ir import Graph, ops
from weft.passes.core.equivalence import EXACT

from ...models import Tiny, applied, count, worst
from ...rewrites import Rewrite, rewrites
from ..norms import FEED


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


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

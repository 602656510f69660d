"""dce: dead nodes and parameters go, inputs stay."""

from __future__ import annotations

import pytest

from weft.ir import TensorType, ops
from weft.ir.types import dtypes

from ...models import applied, weight, worst
from ...rewrites import Rewrite, rewrites
from .inputs import graph


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


def test_dce_keeps_what_outputs_need_and_all_inputs() -> None:
    g, x = graph()
    w = weight(g, "w", 8)
    weight(g, "unused", 8)
    chain = ops.neg(ops.exp(x))
    ops.mul(chain, weight(g, "only_dead", 8))
    a, _ = ops.split.emit(x, sizes=(3, 5))
    g.add_output("y", ops.add(a, ops.slice_(ops.mul(x, w), axis=1, start=0, stop=3)))
    g.add_input("spare", TensorType(dtypes.f32, (2,)))
    after = applied("dce", g)
    assert [n.op.name for n in after.nodes] == ["split", "mul", "slice", "add"]
    assert list(after.params) == ["w"] and list(after.inputs) == ["x", "spare"]
    assert worst(g, after) == 0

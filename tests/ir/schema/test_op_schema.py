"""The schema of an op: types, costs, bodies, numbers as operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array
from weft.ir.schema.checks import require
from weft.ir.schema.op_schema import Cost, OpSchema, Trait
from weft.ir.schema.signature import OpCall
from weft.ir.types import TensorType, dtypes

T = TensorType(dtypes.f16, (2, 3))


def total(x: Array, y: Array | None = None, *, by: float = 1.0) -> Array:
    """x · by.

    Second paragraph."""
    return x * by


def schema(*traits: Trait) -> OpSchema[Any]:
    return OpSchema(total, "", traits, [])


def test_defaults_are_the_type_of_the_first_operand_and_one_flop_per_element() -> None:
    op = schema()
    assert op.types([T], {"by": 1.0}) == (T,)
    assert op.cost_of([T, T], [T], {"by": 1.0}) == Cost(6, 24, 12)
    assert schema(Trait.COPY).cost_of([T], [T], {}) == Cost(0, 12, 12)
    assert schema(Trait.VIEW).cost_of([T], [T], {}) == Cost(0, 0, 0)
    assert op.states_of([T], {}) == () and not op.has_body and not op.takes_numbers
    assert op.doc == "x · by.\n\nSecond paragraph." and repr(op) == "<op total>"


def test_declared_functions_are_used() -> None:
    op = schema()
    op.cost(lambda n: 7 * n.x.rank)
    op.body(lambda n: f"{n.x}*{n.by}")
    op.names(lambda attrs: (("first", "second"), ("sum",)))
    assert op.cost_of([T], [T], {"by": 2.0}) == Cost(14, 12, 12)
    op.cost(lambda n: Cost(1, 2, 3))
    assert op.cost_of([T], [T], {}) + Cost(1, 1, 1) == Cost(2, 3, 4)
    assert op.emit_body(["x"], {"by": 2.0}) == ("x*2.0",)
    assert op.operand_names([1, 2], {}) == ["first", "second"] and op.operand_names([1]) == ["x"]
    with pytest.raises(WeftError, match="op total has no body in simpler ops"):
        schema().emit_body(["x"], {})


def test_errors_of_type_functions_begin_with_the_op() -> None:
    op = schema()

    @op.infer
    def _(n: OpCall) -> TensorType:
        require(n.by != 3, "by must not be 3")
        size: int = n.x.shape[0] // int(n.by)
        return T.with_shape(size)

    assert op.types([T], {"by": 2.0}) == (T.with_shape(1),)
    with pytest.raises(WeftError, match=r"^total: by must not be 3$"):
        op.types([T], {"by": 3.0})
    with pytest.raises(WeftError, match=r"^total: a size or attribute is out of range: .*by zero"):
        op.types([T], {"by": 0.0})


def test_numbers_and_foreign_operands_are_refused() -> None:
    op = schema()
    with pytest.raises(WeftError, match="op total: operand x is a number, which only arithmetic"):
        op.emit(2.0)
    with pytest.raises(WeftError, match="op total: operand x must be a value of a graph, not str"):
        op.emit("x")
    op.numbers(lambda x, y, name=None: f"{x}+{y}")
    with pytest.raises(WeftError, match="all operands are numbers"):
        op.emit(2.0, 3)
    assert op.emit("x", 2) == ("x+2",)


def test_run_reference_returns_a_tuple_of_arrays() -> None:
    (result,) = schema().run_reference([np.array([1.0, 2.0])], {"by": 2.0})
    assert result.tolist() == [2.0, 4.0]

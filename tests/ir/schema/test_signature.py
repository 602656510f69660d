"""Signatures of ops from Python functions, and calls by position and by name."""

from __future__ import annotations

from typing import Any

import pytest

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array
from weft.ir.schema.signature import OpCall, Operand, Signature, is_number, results_class_name


def scale_(x: Array, past: Array | None = None, *, by: float, axis: int = -1) -> tuple[Array, Array]:
    return x, x


def join(first: Array, *xs: Array) -> Array:
    return first


def cut(x: Array, *, sizes: tuple[int, ...]) -> tuple[Array, ...]:
    return (x,)


SCALE = Signature(scale_, ("scaled", "present"))
JOIN = Signature(join, ())


def test_parameters_become_operands_and_attributes() -> None:
    assert SCALE.name == "scale"
    assert SCALE.operands == (Operand("x"), Operand("past", optional=True))
    assert JOIN.operands[1] == Operand("xs", variadic=True)
    assert [*SCALE.attrs] == ["by", "axis"] and SCALE.attrs["by"].required and SCALE.attrs["axis"].default == -1
    assert str(SCALE.__signature__) == "(x, past=None, *, by: float, axis: int = -1, name=None)"
    assert SCALE.operand_index("past") == 1
    with pytest.raises(KeyError, match="op scale has no operand y"):
        SCALE.operand_index("y")


def test_attributes_are_completed_and_checked() -> None:
    assert SCALE.check_attrs({"by": 2}) == {"by": 2.0, "axis": -1}
    with pytest.raises(WeftError, match="op scale has no attribute 'of'; it has by, axis"):
        SCALE.check_attrs({"of": 1})
    with pytest.raises(WeftError, match="op scale needs attribute by"):
        SCALE.check_attrs({})
    with pytest.raises(WeftError, match="op join has no attribute 'of'; it has none"):
        JOIN.check_attrs({"of": 1})


@pytest.mark.parametrize(
    ("signature", "operands", "message"),
    [
        (SCALE, [None], "op scale got no operands"),
        (SCALE, [None, 1], "op scale needs operand x"),
        (SCALE, [1, 2, 3], "op scale takes at most 2 operands, not 3"),
        (JOIN, [1, None, 2], "op join: an operand xs is None"),
    ],
)
def test_missing_and_surplus_operands_are_refused(signature: Signature, operands: list[Any], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        signature.check_operands(operands)


def test_absent_operands_at_the_end_are_dropped() -> None:
    assert SCALE.check_operands([1, None]) == (1,)
    assert JOIN.check_operands([1, 2, 3]) == (1, 2, 3)


def test_operands_may_be_passed_by_name() -> None:
    assert SCALE.split_call((), {"past": 2, "x": 1, "by": 3}) == ((1, 2), {"by": 3})
    assert SCALE.split_call((1,), {"by": 3}) == ((1,), {"by": 3})
    with pytest.raises(WeftError, match="op scale: operand x is passed twice, by position and by name"):
        SCALE.split_call((1,), {"x": 2})


def test_names_of_operands_and_results() -> None:
    assert JOIN.operand_names([1, 2, 3]) == ["first", "xs", "xs"]
    assert SCALE.result_names([1, 2]) == ("scaled", "present")
    assert SCALE.result_names([1]) == ("scaled",)  # without a past there is no present
    assert SCALE.default_output_names(2) == ["scaled", "present"] and JOIN.default_output_names(2) == ["join", "join"]


def test_several_outputs_are_a_named_tuple() -> None:
    packed = SCALE.pack_outputs((1, 2))
    assert packed == (1, 2) and packed.present == 2 and type(packed).__name__ == "ScaleResults"
    assert JOIN.pack_outputs((1,)) == 1
    assert Signature(cut, ()).pack_outputs((1,)) == (1,)
    assert results_class_name("top_k") == "TopKResults"


def test_calls_have_operands_and_attributes_by_name() -> None:
    call = OpCall(JOIN, [1, 2, 3], {})
    assert (call.first, call.xs) == (1, (2, 3))
    with pytest.raises(AttributeError, match="no operand or attribute is called 'y', only first, xs"):
        _ = call.y
    assert is_number(2) and is_number(0.5) and not is_number("2")

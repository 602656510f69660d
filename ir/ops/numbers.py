"""Emit arithmetic, comparisons and `where` with a Python number as operand.

Sums and products with a number become one `affine`, which passes fold into weights. For other ops the number becomes a
constant with the shape of the tensor operand, for which backends write the number again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..errors import WeftError
from ..op import Op, Value
from ..schema.signature import is_number
from ..types import dtypes
from .elementwise import (
    add,
    affine,
    cast,
    clip,
    div,
    equal,
    fill_like,
    floordiv,
    less,
    less_equal,
    maximum,
    minimum,
    mod,
    mul,
    pow,
    reciprocal,
    rsqrt,
    sqrt,
    square,
    sub,
    where,
)

LARGEST_POWER = 64  # of exponents spelled as products; larger ones and fractions are e^(n·ln x) in every backend


def _register_commutative(op: Op, emit: Callable[[Value, float, str | None], Value]) -> None:
    """Register emit(value, number, name of the output) as the number function of `op`, in either order of operands."""

    @op.numbers
    def _(x: Value | float, y: Value | float, name: str | None = None) -> Value:
        return emit(*_split_operands(x, y), name)


_register_commutative(add, lambda value, number, name: affine(value, plus=number, name=name))
_register_commutative(mul, lambda value, number, name: affine(value, by=number, name=name))
_register_commutative(maximum, lambda value, number, name: clip(value, low=number, name=name))
_register_commutative(minimum, lambda value, number, name: clip(value, high=number, name=name))


@sub.numbers
def _(x: Value | float, y: Value | float, name: str | None = None) -> Value:
    value, number = _split_operands(x, y)
    return affine(value, by=-1, plus=number, name=name) if value is y else affine(value, plus=-number, name=name)


@div.numbers
def _(x: Value | float, y: Value | float, name: str | None = None) -> Value:
    value, number = _split_operands(x, y)
    if _is_integer(value):
        raise WeftError(f"div: {value!r} has integer elements; divide with // (floordiv), or cast it to a float dtype")
    if value is y:
        return affine(reciprocal(value), by=number, name=name)
    if number == 0:
        raise WeftError(f"div: {value!r} is divided by 0")
    return affine(value, by=1 / number, name=name)


def _fill_number_operands(op: Op) -> None:
    """Register a number function for `op` that replaces the number by a constant of the shape of the tensor operand."""

    @op.numbers
    def _(x: Value | float, y: Value | float, name: str | None = None) -> Value:
        value, number = _split_operands(x, y)
        if op in (floordiv, mod) and value is x and number == 0:
            raise WeftError(f"{op.name}: {value!r} is divided by 0")
        constant = fill_like(value, number)
        return op(constant, value, name=name) if value is y else op(value, constant, name=name)


for _op in (floordiv, mod, less, less_equal, equal):
    _fill_number_operands(_op)


@pow.numbers
def _(x: Value | float, y: Value | float, name: str | None = None) -> Value:
    value, number = _split_operands(x, y)
    if value is y:
        if number <= 0:
            raise WeftError(f"pow: the base {number} must be positive")
        return pow(fill_like(value, number), value, name=name)
    special = {0.5: sqrt, -0.5: rsqrt, -1.0: reciprocal, 2.0: square}.get(number)
    if special is not None:
        return special(value, name=name)
    if not number.is_integer() or abs(number) > LARGEST_POWER:
        return pow(value, fill_like(value, number), name=name)
    if number in (0, 1):
        return affine(value, by=number, plus=1 - number, name=name)
    if number < 0:
        return reciprocal(_emit_power(value, -int(number)), name=name)
    return _emit_power(value, int(number), name)


def _emit_power(x: Value, exponent: int, name: str | None = None) -> Value:
    if exponent == 1:
        return x
    half = _emit_power(x, exponent // 2)
    return mul(square(half), x, name=name) if exponent % 2 else square(half, name=name)


@where.numbers
def _(condition: Any, x: Any, y: Any, name: str | None = None) -> Value:
    if is_number(condition):
        raise WeftError(f"where: the condition is the number {condition}; it must be a boolean value")
    like = next((v for v in (x, y) if not is_number(v)), None)
    if like is None:
        like = cast(condition, to=dtypes.f32)
    x, y = (fill_like(like, float(v)) if is_number(v) else v for v in (x, y))
    return where(condition, x, y, name=name)


def _is_integer(operand: Any) -> bool:
    """Return whether `operand` is a value with an integer or bool dtype; pattern variables have no type (False)."""
    return isinstance(operand, Value) and not operand.type.dtype.is_float


def _split_operands(x: Any, y: Any) -> tuple[Value, float]:
    """Return (value, number) of two operands in either order; raise WeftError if the number is NaN."""
    value, number = (y, x) if is_number(x) else (x, y)
    constant = float(number)
    if math.isnan(constant):
        raise WeftError(f"the other operand of an op on {value!r} is NaN; use a number")
    return value, constant

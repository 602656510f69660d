"""Emit arithmetic, comparisons and `where` with a Python number as operand.

Sums, products and quotients with a number become `affine`, which passes fold into weights; minima and maxima become
`clip`, small powers become products. Otherwise the number becomes a constant tensor, which backends print as a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..errors import WeftError
from ..op import Op, Value
from ..schema.signature import is_number
from ..types import dtypes
from . import elementwise as ops

LARGEST_POWER = 64  # of exponents spelled as products; larger ones and fractions are e^(n·ln x) in every backend


def _register_commutative(op: Op, emit: Callable[[Value, float, str | None], Value]) -> None:
    """Register emit(value, number, output name) for calls of `op` with a value and a number, in either order."""

    @op.numbers
    def _(x: Value | float, y: Value | float, name: str | None = None) -> Value:
        return emit(*_split_operands(x, y), name)


_register_commutative(ops.add, lambda value, number, name: ops.affine(value, plus=number, name=name))
_register_commutative(ops.mul, lambda value, number, name: ops.affine(value, by=number, name=name))
_register_commutative(ops.maximum, lambda value, number, name: ops.clip(value, low=number, name=name))
_register_commutative(ops.minimum, lambda value, number, name: ops.clip(value, high=number, name=name))


@ops.sub.numbers
def _(x: Value | float, y: Value | float, name: str | None = None) -> Value:
    value, number = _split_operands(x, y)
    if value is y:
        return ops.affine(value, by=-1, plus=number, name=name)
    return ops.affine(value, plus=-number, name=name)


@ops.div.numbers
def _(x: Value | float, y: Value | float, name: str | None = None) -> Value:
    value, number = _split_operands(x, y)
    if isinstance(value, Value) and not value.type.dtype.is_float:  # pattern variables have no type
        raise WeftError(f"div: {value!r} has integer elements; divide with // (floordiv), or cast it to a float dtype")
    if value is y:
        return ops.affine(ops.reciprocal(value), by=number, name=name)
    if number == 0:
        raise WeftError(f"div: {value!r} is divided by 0")
    return ops.affine(value, by=1 / number, name=name)


def _fill_number_operands(op: Op) -> None:
    @op.numbers
    def _(x: Value | float, y: Value | float, name: str | None = None) -> Value:
        value, number = _split_operands(x, y)
        if op in (ops.floordiv, ops.mod) and value is x and number == 0:
            raise WeftError(f"{op.name}: {value!r} is divided by 0")
        constant = ops.fill_like(value, number)
        return op(constant, value, name=name) if value is y else op(value, constant, name=name)


for _op in (ops.floordiv, ops.mod, ops.less, ops.less_equal, ops.equal):
    _fill_number_operands(_op)


@ops.pow.numbers
def _(x: Value | float, y: Value | float, name: str | None = None) -> Value:
    value, number = _split_operands(x, y)
    if value is y:
        if number <= 0:
            raise WeftError(f"pow: the base {number} must be positive")
        return ops.pow(ops.fill_like(value, number), value, name=name)
    special = {0.5: ops.sqrt, -0.5: ops.rsqrt, -1.0: ops.reciprocal, 2.0: ops.square}.get(number)
    if special is not None:
        return special(value, name=name)
    if not number.is_integer() or abs(number) > LARGEST_POWER:
        return ops.pow(value, ops.fill_like(value, number), name=name)
    if number in (0, 1):
        return ops.affine(value, by=number, plus=1 - number, name=name)
    if number < 0:
        return ops.reciprocal(_emit_power(value, -int(number)), name=name)
    return _emit_power(value, int(number), name)


def _emit_power(x: Value, exponent: int, name: str | None = None) -> Value:
    if exponent == 1:
        return x
    half = _emit_power(x, exponent // 2)
    return ops.mul(ops.square(half), x, name=name) if exponent % 2 else ops.square(half, name=name)


@ops.where.numbers
def _(condition: Any, x: Any, y: Any, name: str | None = None) -> Value:
    if is_number(condition):
        raise WeftError(f"where: the condition is the number {condition}; it must be a boolean value")
    like = next((v for v in (x, y) if not is_number(v)), None)
    if like is None:
        like = ops.cast(condition, to=dtypes.f32)
    x, y = (ops.fill_like(like, float(v)) if is_number(v) else v for v in (x, y))
    return ops.where(condition, x, y, name=name)


def _split_operands(x: Any, y: Any) -> tuple[Value, float]:
    """Return (value, number) of two operands in either order; raise WeftError if the number is NaN."""
    value, number = (y, x) if is_number(x) else (x, y)
    constant = float(number)
    if math.isnan(constant):
        raise WeftError(f"{value!r} is combined with NaN; use a number")
    return value, constant

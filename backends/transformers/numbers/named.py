"""Numbers that know their names: they compute as numbers do, and print as fields of a config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.ir.types import sizes
from weft.ir.types.sizes import Call, Monomial, Poly, Size

CONFIG = "config"  # what holds the fields in generated code


class Whole(int):
    """A whole number that prints as the expression over a config that it stands for: ``config.head_dim``.

    Sums, products and quotients of such numbers are such numbers, as far as their expressions have a text. Everywhere
    else they are plain integers.
    """

    size: Poly

    def __new__(cls, value: int, size: Poly) -> Whole:
        number = super().__new__(cls, value)
        number.size = size
        return number

    def __repr__(self) -> str:
        return expression(self.size)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return int.__format__(self, spec) if spec else repr(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)

    def __add__(self, other: Any) -> Any:
        return _made(int.__add__, lambda a, b: a + b, self, other)

    def __radd__(self, other: Any) -> Any:
        return _made(int.__add__, lambda a, b: a + b, other, self)

    def __sub__(self, other: Any) -> Any:
        return _made(int.__sub__, lambda a, b: a + b * -1, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _made(int.__sub__, lambda a, b: a + b * -1, other, self)

    def __mul__(self, other: Any) -> Any:
        return _made(int.__mul__, lambda a, b: a * b, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _made(int.__mul__, lambda a, b: a * b, other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _made(int.__floordiv__, sizes.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _made(int.__floordiv__, sizes.floordiv, other, self)


class Real(float):
    """A number that prints as the field of a config that it is: ``config.rms_norm_eps``."""

    name: str

    def __new__(cls, value: float, name: str) -> Real:
        number = super().__new__(cls, value)
        number.name = name
        return number

    def __repr__(self) -> str:
        return f"{CONFIG}.{self.name}"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return float.__format__(self, spec) if spec else repr(self)

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


def whole(value: int, size: Size) -> int:
    """`value` as the expression `size` over the names of fields."""
    return Whole(value, size) if isinstance(size, Poly) else value


def size_of(value: int) -> Size:
    """The expression that `value` prints as; a plain number is its own."""
    return value.size if isinstance(value, Whole) else int(value)


def _made(compute: Callable[[int, int], int], combine: Callable[[Size, Size], Size], a: Any, b: Any) -> Any:
    """The number of two numbers, with the expression of their expressions."""
    if not isinstance(a, int) or not isinstance(b, int):
        return NotImplemented
    return whole(compute(int(a), int(b)), combine(size_of(a), size_of(b)))


def expression(size: Size) -> str:
    """`size` as Python, its names being fields of the config."""
    if isinstance(size, int):
        return str(int(size))
    text = ""
    for mono, factor in size.terms:
        part = _product(mono, abs(factor))
        sign = "-" if factor < 0 else "+"
        text += f" {sign} {part}" if text else ("-" if factor < 0 else "") + part
    return text if len(size.terms) == 1 and "//" not in text else f"({text})"


def _product(mono: Monomial, factor: int) -> str:
    parts = [str(factor)] if factor != 1 or not mono else []
    for atom, power in sorted(mono, key=lambda factor: not str(factor[0]).startswith("num_")):
        one = _call(atom) if isinstance(atom, Call) else f"{CONFIG}.{atom}"
        parts.append(one if power == 1 else f"{one} ** {power}")
    return " * ".join(parts)


def _call(call: Call) -> str:
    arguments = [expression(a) for a in call.args]
    return f"({' // '.join(arguments)})" if call.fn == "floordiv" else f"{call.fn}({', '.join(arguments)})"

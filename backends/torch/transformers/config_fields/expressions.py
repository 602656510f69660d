"""Sizes as Python expressions over config fields, for generated code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.ir.types import sizes
from weft.ir.types.sizes import Monomial, Poly, Size, SizeCall

CONFIG = "config"  # the variable of the config in generated code


@dataclass(frozen=True)
class ConfigValue:
    """A number that generated code reads from the config. value: the number. size: the expression over config fields.
    The str() and repr() of this object are the source of `size`, so that f-strings write it."""

    value: Any
    size: Size

    def __str__(self) -> str:
        return write_expression(self.size)

    __repr__ = __str__

    def __int__(self) -> int:
        return int(self.value)

    def __sub__(self, other: int) -> ConfigValue:
        return ConfigValue(self.value - other, self.size + -other)

    def __floordiv__(self, other: ConfigValue | int) -> ConfigValue | int:
        return _divide(self, other)

    def __rfloordiv__(self, other: int) -> ConfigValue | int:
        return _divide(other, self)


def _divide(a: ConfigValue | int, b: ConfigValue | int) -> ConfigValue | int:
    numerator, divisor = (x.size if isinstance(x, ConfigValue) else x for x in (a, b))
    size, value = sizes.floordiv(numerator, divisor), int(a) // int(b)
    return ConfigValue(value, size) if isinstance(size, Poly) else value


def write_expression(size: Size) -> str:
    """Return `size` as Python source that reads its fields from ``config``; sums and quotients are in parentheses."""
    if isinstance(size, int):
        return str(int(size))
    text = ""
    for mono, factor in size.terms:
        part = _write_product(mono, abs(factor))
        sign = "-" if factor < 0 else "+"
        text += f" {sign} {part}" if text else ("-" if factor < 0 else "") + part
    return text if len(size.terms) == 1 and "//" not in text else f"({text})"


def _write_product(mono: Monomial, factor: int) -> str:
    parts = [str(factor)] if factor != 1 or not mono else []
    for atom, power in sorted(mono, key=lambda factor: not str(factor[0]).startswith("num_")):
        base = _write_call(atom) if isinstance(atom, SizeCall) else f"{CONFIG}.{atom}"
        parts.append(base if power == 1 else f"{base} ** {power}")
    return " * ".join(parts)


def _write_call(call: SizeCall) -> str:
    arguments = [write_expression(a) for a in call.args]
    return f"({' // '.join(arguments)})" if call.fn == "floordiv" else f"{call.fn}({', '.join(arguments)})"

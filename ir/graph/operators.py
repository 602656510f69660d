"""Arithmetic and comparisons of values, in the operators of Python: ``x * sigmoid(x) + 1``, ``i - j < window``.

Each operator emits an op (``+`` add, ``<`` less, ``&`` logical_and, …). One operand of arithmetic and comparisons may
be a Python number. ``==`` compares identity; `ops.equal` compares elements.
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

from ..errors import WeftError
from ..schema.op_schema import OPS
from ..schema.signature import is_number
from ..types.dtypes import bool_

V = TypeVar("V")  # results of operators: values, or terms of a pattern


class Operators(Generic[V]):
    """Base of graph values and of pattern variables: operators that emit ops and return a V."""

    __slots__ = ()
    __emit_priority__: ClassVar[int] = 0  # the operand with the highest emits
    __array_ufunc__ = None  # numpy scalars leave `number * value` to the value

    def __add__(self, other: V | float) -> V:
        return self._apply("add", self, other)

    def __radd__(self, other: float) -> V:
        return self._apply("add", other, self)

    def __sub__(self, other: V | float) -> V:
        return self._apply("sub", self, other)

    def __rsub__(self, other: float) -> V:
        return self._apply("sub", other, self)

    def __mul__(self, other: V | float) -> V:
        return self._apply("mul", self, other)

    def __rmul__(self, other: float) -> V:
        return self._apply("mul", other, self)

    def __truediv__(self, other: V | float) -> V:
        return self._apply("div", self, other)

    def __rtruediv__(self, other: float) -> V:
        return self._apply("div", other, self)

    def __floordiv__(self, other: V | int) -> V:
        return self._apply("floordiv", self, other)

    def __rfloordiv__(self, other: int) -> V:
        return self._apply("floordiv", other, self)

    def __mod__(self, other: V | int) -> V:
        return self._apply("mod", self, other)

    def __rmod__(self, other: int) -> V:
        return self._apply("mod", other, self)

    def __pow__(self, other: V | float) -> V:
        return self._apply("pow", self, other)

    def __rpow__(self, other: float) -> V:
        return self._apply("pow", other, self)

    def __matmul__(self, other: V) -> V:
        return NotImplemented if is_number(other) else self._apply("matmul", self, other)

    def __neg__(self) -> V:
        return self._apply("neg", self)

    def __abs__(self) -> V:
        return self._apply("abs", self)

    def __lt__(self, other: V | float) -> V:
        return self._apply("less", self, other)

    def __le__(self, other: V | float) -> V:
        return self._apply("less_equal", self, other)

    def __gt__(self, other: V | float) -> V:
        return self._apply("less", other, self)

    def __ge__(self, other: V | float) -> V:
        return self._apply("less_equal", other, self)

    def __and__(self, other: V) -> V:
        return NotImplemented if is_number(other) else self._apply("logical_and", self, other)

    def __or__(self, other: V) -> V:
        return NotImplemented if is_number(other) else self._apply("logical_or", self, other)

    def __invert__(self) -> V:
        return self._apply("logical_not", self)

    def __bool__(self) -> bool:
        """Return True; raise WeftError for a bool tensor, as in ``if x < 3``: its elements are unknown here."""
        kind = getattr(self, "type", None)  # variables of patterns have no type
        if kind is not None and kind.dtype == bool_:
            raise WeftError(
                f"{self!r} is a condition whose elements are not known while a graph is built: choose between values "
                "with where(…), combine conditions with &, | and ~, and test for an absent one with `is None`"
            )
        return True

    def _apply(self, name: str, *operands: Any) -> V:
        """Emit the op called `name` and return its output; NotImplemented if an operand is neither value nor number."""
        supported = all(isinstance(v, Operators) or is_number(v) for v in operands)
        value: V = OPS[name](*operands) if supported else NotImplemented
        return value

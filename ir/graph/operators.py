"""Arithmetic and comparisons of values, in the operators of Python: ``x * sigmoid(x) + 1``, ``i - j < window``.

Each operator emits an op (``+`` add, ``<`` less, ``&`` logical_and, …). One operand of arithmetic and comparisons may
be a Python number. ``==`` compares identity; `ops.equal` compares elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from ..errors import WeftError
from ..schema.op_schema import OPS
from ..schema.signature import is_number
from ..types.dtypes import bool_

V = TypeVar("V")  # results of operators: values, or terms of a pattern


def _binary(name: str, reflected: bool = False) -> Callable[[Operators[V], V | float], V]:
    """Return the method of an operator that emits the op called `name`; `reflected` swaps the operands."""
    return lambda self, other: self._apply(name, *((other, self) if reflected else (self, other)))


def _integral(name: str, reflected: bool = False) -> Callable[[Operators[V], V | int], V]:
    return _binary(name, reflected)


def _unary(name: str) -> Callable[[Operators[V]], V]:
    return lambda self: self._apply(name, self)


def _of_values(name: str) -> Callable[[Operators[V], V], V]:
    return lambda self, other: NotImplemented if is_number(other) else self._apply(name, self, other)


class Operators(Generic[V]):
    """Base of graph values and of pattern variables: operators that emit ops and return a V."""

    __slots__ = ()
    __emit_priority__: ClassVar[int] = 0  # the operand with the highest emits
    __array_ufunc__ = None  # numpy scalars leave `number * value` to the value

    __add__, __radd__ = _binary("add"), _binary("add", reflected=True)
    __sub__, __rsub__ = _binary("sub"), _binary("sub", reflected=True)
    __mul__, __rmul__ = _binary("mul"), _binary("mul", reflected=True)
    __truediv__, __rtruediv__ = _binary("div"), _binary("div", reflected=True)
    __floordiv__, __rfloordiv__ = _integral("floordiv"), _integral("floordiv", reflected=True)
    __mod__, __rmod__ = _integral("mod"), _integral("mod", reflected=True)
    __pow__, __rpow__ = _binary("pow"), _binary("pow", reflected=True)
    __lt__, __gt__ = _binary("less"), _binary("less", reflected=True)
    __le__, __ge__ = _binary("less_equal"), _binary("less_equal", reflected=True)
    __matmul__, __and__, __or__ = _of_values("matmul"), _of_values("logical_and"), _of_values("logical_or")
    __neg__, __abs__, __invert__ = _unary("neg"), _unary("abs"), _unary("logical_not")

    def __bool__(self) -> bool:
        """Return True; raise WeftError for a bool tensor, as in ``if x < 3``: its elements are unknown here."""
        kind = getattr(self, "type", None)  # variables of patterns have no type
        if kind is not None and kind.dtype == bool_:
            raise WeftError(
                f"{self!r} cannot decide an if, and, or or not of Python, as its elements are not known yet: use "
                "where(…), &, | and ~, or test an operand that may be absent with `is None`"
            )
        return True

    def _apply(self, name: str, *operands: Any) -> V:
        """Emit the op called `name` and return its output; NotImplemented if an operand is neither value nor number."""
        supported = all(isinstance(v, Operators) or is_number(v) for v in operands)
        value: V = OPS[name](*operands) if supported else NotImplemented
        return value

"""Function calls, built up as the text of a statement and its operands."""

from __future__ import annotations

from typing import Any

from weft.ir.graph import Value

from ..program.emitter import Emitter
from ..program.statements import Operand, Var
from .elementwise import format_number

Argument = Value | Operand


class FunctionCall:
    """A call of `function`: the text of its arguments, and the operands that fill their placeholders.

    For a call that is an argument of another call, pass the list `operands` of the outer call: they share it.
    """

    def __init__(self, function: str, operands: list[Argument] | None = None) -> None:
        self.function = function
        self.operands: list[Argument] = [] if operands is None else operands
        self.arguments: list[str] = []

    def __str__(self) -> str:
        return f"{self.function}({', '.join(self.arguments)})"

    def placeholder(self, operand: Argument) -> str:
        """Return the placeholder of `operand`, such as ``{2}``; equal operands get the same."""
        if operand not in self.operands:
            self.operands.append(operand)
        return f"{{{self.operands.index(operand)}}}"

    def add(self, *arguments: Argument | str | None) -> FunctionCall:
        """Append positional arguments (operands, text with placeholders, or None), and return the call."""
        self.arguments += [a if isinstance(a, str) else "None" if a is None else self.placeholder(a) for a in arguments]
        return self

    def add_keywords(self, **operands: Argument | None) -> FunctionCall:
        """Append keyword arguments except those that are None, and return the call."""
        self.arguments += [f"{name}={self.placeholder(o)}" for name, o in operands.items() if o is not None]
        return self

    def set(self, name: str, value: Any, default: Any = None) -> FunctionCall:
        """Append a keyword argument with a constant value, unless it is the function's `default`; return the call."""
        if value != default:
            self.arguments.append(f"{name}={format_number(value) if isinstance(value, float) else repr(value)}")
        return self

    def emit(self, e: Emitter, after: str = "", name: str = "", replaces: Argument | None = None) -> Var:
        """Emit the call, followed by the text `after` (such as ``.flatten(2)``), and return the result. It is called
        `name`, or may reuse the name of the operand `replaces`."""
        index = None if replaces is None else self.operands.index(replaces)
        return e.emit(f"{self}{after}", *self.operands, name=name, replaces=index)

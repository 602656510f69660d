"""Builder of function calls: the text of a call, with placeholders, and the operands that fill them."""

from __future__ import annotations

from typing import Any

from weft.ir.graph import Value

from ..program.emitter import Emitter
from ..program.statements import Operand, Var
from .elementwise import format_number

Argument = Value | Operand


class FunctionCall:
    """A call of `function`: the source of its arguments, and the operands that fill their placeholders. A call that is
    an argument of another call shares the other's list of operands: pass that list as `operands`."""

    def __init__(self, function: str, operands: list[Argument] | None = None) -> None:
        self.function = function
        self.operands: list[Argument] = [] if operands is None else operands
        self.arguments: list[str] = []

    def __str__(self) -> str:
        return f"{self.function}({', '.join(self.arguments)})"

    def placeholder(self, operand: Argument) -> str:
        """Return the placeholder of `operand`, such as ``{2}``; equal operands have the same one."""
        if operand not in self.operands:
            self.operands.append(operand)
        return f"{{{self.operands.index(operand)}}}"

    def add(self, *arguments: Argument | str | None) -> FunctionCall:
        """Append positional arguments (operands, source with placeholders, or None), and return this call."""
        self.arguments += [a if isinstance(a, str) else "None" if a is None else self.placeholder(a) for a in arguments]
        return self

    def add_named(self, **operands: Argument | None) -> FunctionCall:
        """Append `operands` as keyword arguments, except those that are None, and return this call."""
        self.arguments += [f"{name}={self.placeholder(o)}" for name, o in operands.items() if o is not None]
        return self

    def set(self, name: str, value: Any, default: Any = None) -> FunctionCall:
        """Append the keyword argument `name` with a constant `value`, unless it is the `default`; return this call."""
        if value != default:
            self.arguments.append(f"{name}={format_number(value) if isinstance(value, float) else repr(value)}")
        return self

    def emit(self, e: Emitter, after: str = "", name: str = "", replaces: Argument | None = None) -> Var:
        """Emit the call followed by the source `after`, such as ``.flatten(2)``; return the result, a variable called
        `name`. The variable may reuse the name of the operand `replaces`."""
        index = None if replaces is None else self.operands.index(replaces)
        return e.emit(f"{self}{after}", *self.operands, name=name, replaces=index)

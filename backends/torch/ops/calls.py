"""Calls of functions as the text of statements."""

from __future__ import annotations

from typing import Any

from weft.ir.graph import Value

from ..program.emitter import Emitter
from ..program.statements import Operand, Var
from .elementwise import number

Given = Value | Operand


class Call:
    """A call of `function` in the text of a statement, and the operands that fill the places of its arguments.

    A call that is an argument of another shares the `operands` of that.
    """

    def __init__(self, function: str, operands: list[Given] | None = None) -> None:
        self.function = function
        self.operands: list[Given] = [] if operands is None else operands
        self.arguments: list[str] = []

    def __str__(self) -> str:
        return f"{self.function}({', '.join(self.arguments)})"

    def place(self, operand: Given) -> str:
        """The place of `operand` in the text: the same for every use of it."""
        if operand not in self.operands:
            self.operands.append(operand)
        return f"{{{self.operands.index(operand)}}}"

    def give(self, *arguments: Given | str | None) -> Call:
        """Add arguments: operands, or text that has their places already, or None."""
        self.arguments += [a if isinstance(a, str) else "None" if a is None else self.place(a) for a in arguments]
        return self

    def named(self, **operands: Given | None) -> Call:
        """Add keyword arguments; those that are None are left out."""
        self.arguments += [f"{name}={self.place(o)}" for name, o in operands.items() if o is not None]
        return self

    def set(self, name: str, value: Any, default: Any = None) -> Call:
        """Add a keyword argument with a constant value, unless that is the launcher's `default`."""
        if value != default:
            self.arguments.append(f"{name}={number(value) if isinstance(value, float) else repr(value)}")
        return self

    def emit(self, e: Emitter, after: str = "", name: str = "", replaces: Given | None = None) -> Var:
        """The result of the call, with the text `after` it; it takes over the name of what it `replaces`."""
        index = None if replaces is None else self.operands.index(replaces)
        return e.emit(f"{self}{after}", *self.operands, name=name, replaces=index)

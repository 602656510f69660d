"""The outputs of a graph."""

from __future__ import annotations

from collections import UserDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .graph import Value


class Outputs(UserDict[str, "Value"]):
    """Values by name, in order. Finding the names of a value takes no longer the more outputs there are: a decoder with
    caches has two for every layer."""

    def __init__(self) -> None:
        self._names: dict[Value, dict[str, None]] = {}
        super().__init__()

    def names(self, value: Value) -> tuple[str, ...]:
        """The names of `value`, none if it is no output."""
        return tuple(self._names.get(value, ()))

    def __setitem__(self, name: str, value: Value) -> None:
        if name in self.data:
            self._forget(name)
        self.data[name] = value
        self._names.setdefault(value, {})[name] = None

    def __delitem__(self, name: str) -> None:
        self._forget(name)
        del self.data[name]

    def _forget(self, name: str) -> None:
        names = self._names[self.data[name]]
        del names[name]
        if not names:
            del self._names[self.data[name]]

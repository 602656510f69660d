"""The outputs of a graph."""

from __future__ import annotations

from collections import UserDict
from typing import Generic, TypeVar

V = TypeVar("V")


class Outputs(UserDict[str, V], Generic[V]):
    """The outputs of a graph: values by output name, in order of insertion; `names_of` takes constant time."""

    def __init__(self) -> None:
        self._names: dict[V, dict[str, None]] = {}
        super().__init__()

    def names_of(self, value: V) -> tuple[str, ...]:
        """Return all names under which `value` is an output, in order; () if it is not an output."""
        return tuple(self._names.get(value, ()))

    def __setitem__(self, name: str, value: V) -> None:
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

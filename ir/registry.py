"""Registries: things of one kind by name, which modules add when they are imported."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TypeVar

from .errors import unknown

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Things of one `kind` by name.

    The first look imports `catalogue`, the package whose modules add weft's own. Names keep the order
    of addition. `hint` is what the error for an unknown name suggests.
    """

    def __init__(self, kind: str, catalogue: str, hint: str) -> None:
        self.kind, self.catalogue, self.hint = kind, catalogue, hint
        self._items: dict[str, T] = {}
        self._loaded = False

    def add(self, name: str, item: T) -> None:
        """Add `item`.

        Raises:
            ValueError: if the name is taken.
        """
        if name in self._items:
            raise ValueError(f"{self.kind} {name!r} is declared twice: {self._items[name]!r} and {item!r}")
        self._items[name] = item

    def lookup(self, name: str) -> T:
        """Return the item called `name`.

        Raises:
            WeftError: if there is none, with the nearest names.
        """
        if name not in self:
            raise unknown(self.kind, name, self, self.hint)
        return self[name]

    def load(self) -> None:
        """Import the catalogue, once."""
        if not self._loaded:
            self._loaded = True  # before the import: its modules may look names up
            importlib.import_module(self.catalogue)

    def __getitem__(self, name: str) -> T:
        self.load()
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        self.load()
        return iter(self._items)

    def __len__(self) -> int:
        self.load()
        return len(self._items)

"""Registries: items of one kind by name, which modules of weft and plugins add when they are imported.

Plugins are modules of other packages, found by entry points of the group `weft.plugins` or imported by `import_plugin`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TypeVar

from .errors import WeftError, unknown_name_error
from .storage.documents import format_error

T = TypeVar("T")
GROUP = "weft.plugins"
_depth = 0  # number of catalogues being imported: one may look up names of another
_plugins = ""  # "loading", "loaded"
_trouble = ""  # the error message of the first plugin that failed


class DuplicateName(WeftError, ValueError):
    """The error for two different items of one kind with the same name."""


class Registry(Mapping[str, T]):
    """A mapping from names to items of one `kind`, a noun for error messages such as "op".

    The first iteration, or lookup of a missing name, imports the `catalogues` (space-separated packages whose modules
    add weft's own items) and then the plugins. Iteration yields names in the order of addition. The error for an
    unknown name ends with `hint` if no name is similar.
    """

    def __init__(self, kind: str, catalogues: str, hint: str) -> None:
        self.kind, self.catalogues, self.hint = kind, catalogues.split(), hint
        self._items: dict[str, T] = {}
        self._loaded = self._complete = False

    def add(self, name: str, item: T) -> None:
        """Add `item` as `name`. It replaces an equal item, or one with its `__qualname__` (as in a rerun cell).

        Raises:
            DuplicateName: if a different item has the name.
            WeftError: if the name is not a string.
        """
        if not isinstance(name, str):
            raise WeftError(f"{self.kind} {name!r}: the name must be a string, not {type(name).__name__}")
        present = self._items.setdefault(name, item)
        if present is not item and getattr(present, "__qualname__", present) != getattr(item, "__qualname__", item):
            raise DuplicateName(
                f"{self.kind} {name} is declared twice, as {present!r} and {item!r}; rename one of them"
            )
        self._items[name] = item

    def remove(self, name: str) -> None:
        """Remove the item called `name`; do nothing if there is none."""
        self._items.pop(name, None)

    def lookup(self, name: str) -> T:
        """Return the item called `name`.

        Raises:
            WeftError: if there is none; the message suggests similar names.
        """
        if name not in self:
            raise unknown_name_error(self.kind, name, self, self.hint)
        return self[name]

    def load(self) -> None:
        """Import the catalogues and the plugins; do nothing if they are imported.

        Raises:
            WeftError: if a plugin cannot be loaded.
        """
        global _depth
        if self._complete:
            return
        if not self._loaded:
            self._loaded, _depth = True, _depth + 1  # before the import: its modules may look names up
            early, self._items = self._items, {}
            try:
                for catalogue in self.catalogues:
                    importlib.import_module(catalogue)
                self._append(early)  # items added before the import follow weft's own
            except BaseException:
                self._loaded = False
                raise
            finally:
                _depth -= 1
        if not _depth:  # plugins may import any part of weft, so they wait until no part is half imported
            self._complete = load_plugins()

    def _append(self, items: dict[str, T]) -> None:
        for name, item in items.items():
            self.add(name, item)

    def __getitem__(self, name: str) -> T:
        if name not in self._items:  # names that weft's modules look up during their import must not import plugins
            self.load()
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        self.load()
        return iter(self._items)

    def __len__(self) -> int:
        self.load()
        return len(self._items)


class Alternatives(Registry[list[T]]):
    """A registry of lists: each name has several items, in the order in which users of the registry try them."""

    def __init__(self, kind: str, catalogues: str, hint: str) -> None:
        super().__init__(kind, catalogues, hint)
        self._first: dict[str, list[T]] = {}

    def put(self, name: str, item: T, first: bool = False) -> None:
        """Append `item` to the list of `name`; with `first`, put it before all items of that list."""
        items = self._items.setdefault(name, [])
        if first:
            self._first.setdefault(name, []).insert(0, item)
        else:
            items.append(item)

    def _append(self, items: dict[str, list[T]]) -> None:
        for name, added in items.items():
            self._items.setdefault(name, []).extend(added)

    def __getitem__(self, name: str) -> list[T]:
        self.load()  # always: a plugin may have added to `name` before weft's own items
        items = self._items[name]
        return [*self._first.get(name, ()), *items]


def load_plugins() -> bool:
    """Import the plugins of all installed packages at the first call. Return True once they are imported.

    A call during that import returns False. An entry point names a module, which registers its items when it is
    imported, or a callable that registers them.

    Raises:
        WeftError: naming a plugin that fails. Later calls raise it again: nothing may run without that plugin.
    """
    global _plugins, _trouble
    if not _plugins:
        _plugins = "loading"  # before the import: plugins look names up
        from importlib.metadata import entry_points  # costs more than the rest of `import weft`

        for point in entry_points(group=GROUP):
            try:
                plugin = point.load()
                if callable(plugin):
                    plugin()
            except BaseException as error:  # foreign code raises anything
                owner = f" of {point.dist.name}" if point.dist else ""
                _trouble = f"the plugin {point.name}{owner} ({point.value}) cannot be loaded: {_describe(error)}"
                raise WeftError(_trouble) from error
        _plugins = "loaded"
    if _trouble:
        raise WeftError(_trouble)
    return _plugins == "loaded"


def import_plugin(name: str) -> None:
    """Import the module `name`, which registers its items, from the Python path or the working folder.

    Raises:
        WeftError: if there is no such module, or its import fails.
    """
    sys.path.append(folder := os.getcwd())  # at the end, where it hides no installed module
    try:
        importlib.import_module(name)
    except BaseException as error:  # foreign code raises anything
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise WeftError(f"there is no module {name} on the Python path or in the working folder") from error
        raise WeftError(f"the module {name} cannot be imported: {_describe(error)}") from error
    finally:
        with contextlib.suppress(ValueError):  # the module may have removed it
            sys.path.remove(folder)


def _describe(error: BaseException) -> str:
    """Return the message of `error`, after its class unless it is a WeftError; raise it again if it is an interrupt."""
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and type(error) is not SystemExit):
        raise error
    return str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {format_error(error)}"

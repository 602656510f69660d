"""Registries: things of one kind by name, which modules add when they are imported: weft's own, and plugins.

Plugins are what other packages add, by entry points of the group `weft.plugins`, or modules that somebody imports.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TypeVar

from .errors import WeftError, unknown
from .storage.documents import told

T = TypeVar("T")
GROUP = "weft.plugins"
_depth = 0  # catalogues that are being imported: one may look up names of another
_plugins = ""  # "loading", "loaded"
_trouble = ""  # of the first plugin that failed


class DeclaredTwice(WeftError, ValueError):
    """Two things of one kind have the same name."""


class Registry(Mapping[str, T]):
    """Things of one `kind` by name.

    The first look at all of them, or for a name that is not there yet, imports the `catalogues`, packages whose modules
    add weft's own, and then the plugins. Names keep the order of addition. `hint` is what the error for an unknown name
    suggests.
    """

    def __init__(self, kind: str, catalogues: str, hint: str) -> None:
        self.kind, self.catalogues, self.hint = kind, catalogues.split(), hint
        self._items: dict[str, T] = {}
        self._loaded = self._complete = False

    def add(self, name: str, item: T) -> None:
        """Add `item`. A class may be defined again, as by a cell of a notebook: the last one counts.

        Raises:
            DeclaredTwice: if the name is taken.
            WeftError: if it is no text.
        """
        if not isinstance(name, str):
            raise WeftError(f"{self.kind} {name!r}: a name must be a text")
        known = self._items.setdefault(name, item)
        if known is not item and getattr(known, "__qualname__", known) != getattr(item, "__qualname__", item):
            raise DeclaredTwice(f"{self.kind} {name} is declared twice: {known!r} and {item!r}")
        self._items[name] = item

    def remove(self, name: str) -> None:
        """Forget the item called `name`, if there is one."""
        self._items.pop(name, None)

    def lookup(self, name: str) -> T:
        """Return the item called `name`.

        Raises:
            WeftError: if there is none, with the nearest names.
        """
        if name not in self:
            raise unknown(self.kind, name, self, self.hint)
        return self[name]

    def load(self) -> None:
        """Import the catalogue and the plugins, once.

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
                self._append(early)  # what others have added stands behind weft's own
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
        if name not in self._items:  # so that what weft's modules name while they are imported imports no plugin
            self.load()
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        self.load()
        return iter(self._items)

    def __len__(self) -> int:
        self.load()
        return len(self._items)


class Alternatives(Registry[list[T]]):
    """Things of one `kind` of which several may serve one name, in the order in which they are tried."""

    def __init__(self, kind: str, catalogues: str, hint: str) -> None:
        super().__init__(kind, catalogues, hint)
        self._first: dict[str, list[T]] = {}

    def put(self, name: str, item: T, first: bool = False) -> None:
        """Add `item` behind those of the same name, or as the `first`."""
        known = self._items.setdefault(name, [])
        if first:
            self._first.setdefault(name, []).insert(0, item)
        else:
            known.append(item)

    def _append(self, items: dict[str, list[T]]) -> None:
        for name, known in items.items():
            self._items.setdefault(name, []).extend(known)

    def __getitem__(self, name: str) -> list[T]:
        self.load()  # a plugin may have put one there before weft's own
        known = self._items[name]
        return [*self._first.get(name, ()), *known]


def load_plugins() -> bool:
    """Import the plugins of all installed packages, once; return whether all are there: not while they are imported.

    An entry point names a module, which registers what it adds when it is imported, or a callable, which then does so.

    Raises:
        WeftError: naming a plugin that fails; at every call, so that nothing runs with a part of the plugins.
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
            except BaseException as error:  # of anybody's code
                owner = f" of {point.dist.name}" if point.dist else ""
                _trouble = f"the plugin {point.name}{owner} ({point.value}) cannot be loaded: {_sentence(error)}"
                raise WeftError(_trouble) from error
        _plugins = "loaded"
    if _trouble:
        raise WeftError(_trouble)
    return _plugins == "loaded"


def import_plugin(name: str) -> None:
    """Import the module `name`, from the Python path or the working folder; it registers what it adds.

    Raises:
        WeftError: if there is none, or it fails.
    """
    sys.path.append(folder := os.getcwd())  # at the end, where it hides no installed module
    try:
        importlib.import_module(name)
    except BaseException as error:  # of anybody's code
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise WeftError(f"there is no module {name} on the Python path or in the working folder") from error
        raise WeftError(f"the module {name} cannot be imported: {_sentence(error)}") from error
    finally:
        with contextlib.suppress(ValueError):  # where the module has taken it out itself
            sys.path.remove(folder)


def _sentence(error: BaseException) -> str:
    """Return what went wrong in somebody's code. Raises `error` again where it is an interrupt, or of a signal."""
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and type(error) is not SystemExit):
        raise error
    return str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {told(error)}"

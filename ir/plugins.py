"""Plugins: ops, passes, families and targets of other packages, added by entry points of the group `weft.plugins`."""

from __future__ import annotations

import importlib

from .errors import WeftError

GROUP = "weft.plugins"
_started = False
_trouble = ""  # of the first plugin that failed


def load_plugins() -> None:
    """Import the plugins of all installed packages, once.

    An entry point names a module, which registers what it adds when it is imported, or a callable, which then does so.

    Raises:
        WeftError: naming a plugin that fails; at every call, so that nothing runs with a part of the plugins.
    """
    global _started, _trouble
    if not _started:
        _started = True  # before the import: plugins look names up
        from importlib.metadata import entry_points  # costs more than the rest of `import weft`

        for point in entry_points(group=GROUP):
            try:
                plugin = point.load()
                if callable(plugin):
                    plugin()
            except Exception as error:  # of anybody's code
                owner = f" of {point.dist.name}" if point.dist else ""
                _trouble = f"the plugin {point.name}{owner} ({point.value}) cannot be loaded: {_sentence(error)}"
                raise WeftError(_trouble) from error
    if _trouble:
        raise WeftError(_trouble)


def import_plugin(name: str) -> None:
    """Import the module `name`, which registers what it adds.

    Raises:
        WeftError: if there is none on the Python path, or it fails.
    """
    try:
        importlib.import_module(name)
    except Exception as error:  # of anybody's code
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise WeftError(f"there is no module {name} on the Python path (PYTHONPATH adds folders to it)") from error
        raise WeftError(f"the module {name} cannot be imported: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"

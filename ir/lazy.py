"""Import the names of a package on first use. Its stub ``__init__.pyi`` lists them, also for type checkers."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return ``__getattr__`` and ``__all__`` for `package`; `file` is the path of its ``__init__.py``.

    The stub ``__init__.pyi`` next to `file` imports each name from its module: ``from .graph import Graph as Graph``.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = (node for node in stub.body if isinstance(node, ast.ImportFrom) and node.level == 1)
    homes = {alias.name: f".{node.module}" for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(homes[name], package)
        return getattr(home, name) if hasattr(home, name) else import_module(f"{homes[name]}.{name}", package)

    return get, sorted(homes)

"""Find things by name: every module with logic has a test file at its path, and no two modules or classes share a name.

`python -m tests.style.paths` prints the modules without a test file. The test of ``passes/core/trace.py`` is
``tests/passes/core/test_trace.py``.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from .words import FOLDERS

SIMPLE = (ast.Pass, ast.Raise)
DECIDING = (ast.If, ast.For, ast.While, ast.comprehension, ast.IfExp, ast.Call, ast.BinOp, ast.Compare)


def modules(root: Path) -> Iterator[Path]:
    """Yield the modules of the four folders, packages' ``__init__.py`` left out, as paths relative to `root`."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if path.name != "__init__.py":
                yield path.relative_to(root)


def has_logic(tree: ast.Module) -> bool:
    """Return whether a module has a function that computes something.

    A module of constants, records, protocols and abstract methods has none.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = [s for s in node.body if not isinstance(s, SIMPLE) and not _is_text(s)]
            if len(body) > 1 or any(isinstance(part, DECIDING) for s in body for part in ast.walk(s)):
                return True
    return False


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def untested(root: Path) -> list[Path]:
    """Return the modules with logic that have no test file at their path."""
    return [
        path
        for path in modules(root)
        if not (root / "tests" / path.parent / f"test_{path.name}").exists()
        and has_logic(ast.parse((root / path).read_text(encoding="utf-8")))
    ]


def shared_names(named: Iterable[tuple[str, Path]]) -> dict[str, list[Path]]:
    """Return the names with several different paths, with these paths."""
    paths: dict[str, list[Path]] = defaultdict(list)
    for name, path in named:
        paths[name].append(path)
    return {name: found for name, found in paths.items() if len(found) > 1}


def classes(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the classes of all modules with the module's path."""
    for path in modules(root):
        for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield node.name, path


if __name__ == "__main__":
    for path in (paths := untested(Path.cwd())):
        print(path)
    print(f"{len(paths)} modules with logic have no test file at their path")

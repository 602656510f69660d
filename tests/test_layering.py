"""ir < passes < backends < frontends: relative imports inside one of them, `weft.<folder>` across, downward only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

LAYERS = ("ir", "passes", "backends", "frontends")


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_downward(layer: str, root: Path) -> None:
    lower = {f"weft.{name}" for name in LAYERS[: LAYERS.index(layer)]} | {"weft.__version__"}
    wrong = []
    for path in sorted((root / layer).rglob("*.py")):
        depth = len(path.relative_to(root).parts) - 1
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                names = ["weft"] if isinstance(node, ast.ImportFrom) and node.level > depth else []
            ours = [name for name in names if name.split(".")[0] in ("weft", *LAYERS)]
            wrong += [f"{path}:{node.lineno}: {name}" for name in ours if ".".join(name.split(".")[:2]) not in lower]
    assert not wrong

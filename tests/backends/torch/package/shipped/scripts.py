"""Compiled folders, and token ids as scripts print them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import weft
from weft.ir import Graph


def compiled(graph: Graph, out: Path, **options: Any) -> Path:
    weft.compile(graph, out, target="torch", max_length=19, **options)
    return out


def ids_of(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]

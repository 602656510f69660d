"""weft's side of the comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_peers import Contender
from torch import Tensor

OURS: dict[str, str] = {}


def ours(name: str, model: Any, capacity: int) -> Contender:
    raise ValueError(name)


def prefill(model: Any, rows: int) -> Callable[[Tensor], object]:
    raise ValueError("not yet")

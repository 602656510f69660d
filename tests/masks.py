"""The keys that queries see, token by token: the definition of every pattern that those of weft are held against."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def sees(
    i: int,
    j: int,
    *,
    pattern: str = "dense",
    stride: int = 1,
    summary: int = 1,
    window: int | None = None,
    keep_first: int = 0,
    causal: bool = False,
) -> bool:
    """Return whether the query at `i` sees the key at `j` (Child 2019; Beltagy 2020; Xiao 2023; Llama 4, 2025)."""
    block = range(i - i % stride, i - i % stride + stride)
    listed = {
        "dense": True,
        "dilated": (i - j) % stride == 0,
        "strided": abs(i - j) < stride or (i - j) % stride == 0,
        "fixed": j in block or j % stride in range(stride - summary, stride),
        "chunked": j in block,
    }
    near = listed[pattern] and (window is None or -window < j - i < window)
    return (near or j < keep_first) and (j <= i or not causal)


SETTINGS: dict[str, dict[str, Any]] = {  # one or more of each pattern, for texts of 17 tokens and more
    "dense": {},
    "banded": {"window": 4},
    "banded, and the first keys": {"window": 5, "keep_first": 3},
    "dilated": {"pattern": "dilated", "stride": 3},
    "dilated window": {"pattern": "dilated", "stride": 2, "window": 7},
    "strided": {"pattern": "strided", "stride": 4},
    "fixed": {"pattern": "fixed", "stride": 4},
    "fixed, two summaries": {"pattern": "fixed", "stride": 7, "summary": 2},
    "chunked": {"pattern": "chunked", "stride": 5},
    "chunked, and the first key": {"pattern": "chunked", "stride": 8, "keep_first": 1},
}
PATTERNS: dict[str, tuple[dict[str, Any], Callable[..., bool]]] = {
    name: (settings, partial(sees, **settings)) for name, settings in SETTINGS.items()
}

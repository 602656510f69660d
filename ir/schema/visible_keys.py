"""Visible keys: which keys a query of softmax attention sees, by the positions of both.

There is one description, `VisibleKeys`. Backends derive their forms from it: it computes with whatever has the
operators of Python, be it arrays of numpy, values of a graph, values of an ONNX graph or the text of expressions.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

PATTERNS = ("dense", "dilated", "strided", "fixed", "chunked")


@dataclass(frozen=True)
class VisibleKeys:
    """The attributes of `attention` that hide keys. The query at position i sees the key at position j where all hold:

    - `causal`: i ≥ j,
    - `window`: |i − j| < window,
    - `pattern`: dilated (i − j divisible by `stride`), strided (|i − j| < stride, or divisible by it; Child 2019, arXiv
      1904.10509), fixed (the same block of `stride`, or the last `summary` of any block; Child 2019), chunked (the same
      block of `stride`; Llama 4).

    Neither window nor pattern hides the first `keep_first` keys of a text (Xiao 2023, arXiv 2309.17453).
    """

    causal: bool = False
    window: int | None = None
    keep_first: int = 0
    pattern: str = "dense"
    stride: int = 1
    summary: int = 1

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> VisibleKeys:
        """Read them off the attributes of a node; those that its op lacks keep their defaults."""
        return cls(**{f.name: attrs[f.name] for f in fields(cls) if f.name in attrs})

    @property
    def local(self) -> bool:
        """Return whether more than causality hides keys."""
        return self.window is not None or self.pattern != "dense"

    def conditions(self, query: Any, key: Any, equal: Callable[[Any, Any], Any] = operator.eq) -> list[Any]:
        """The conditions on the positions `query` and `key`, causality last. All must hold; none hides nothing.

        `equal` compares where ``==`` means something else, as for values of a graph.
        """
        near: list[Any] = []
        distance = query - key
        size = distance if self.causal else abs(distance)  # causality comes on its own, below
        if self.window is not None:
            near.append(size < self.window)
        if self.pattern == "dilated":
            near.append(equal(distance % self.stride, 0))
        elif self.pattern == "strided":
            near.append((size < self.stride) | equal(distance % self.stride, 0))
        elif self.pattern in ("fixed", "chunked"):
            block = equal(query // self.stride, key // self.stride)
            ending = key % self.stride >= self.stride - self.summary if self.pattern == "fixed" else None
            near.append(block if ending is None else block | ending)
        # Before causality is added: it holds for the first keys too.
        if self.keep_first and near:
            near = [functools.reduce(operator.and_, near) | (key < self.keep_first)]
        return [*near, query >= key] if self.causal else near

    def mask(self, query: np.ndarray[Any, Any], key: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Compute the reference mask: True where queries at positions `query` see keys at `key`, which broadcast."""
        everything = np.ones(np.broadcast_shapes(query.shape, key.shape), np.bool_)
        return functools.reduce(np.logical_and, self.conditions(query, key), everything)

"""Attention masks by position: which keys a query of softmax attention sees, by the positions of both.

`VisibleKeys` is the only definition of masks by position; masks by data are the operands `key_mask` and `bias`. Its
`conditions` are written once, in operators of Python, and run on NumPy arrays (the reference), on values of a graph
(the body of the op), on tensors of an ONNX model and on expressions in the source of a PyTorch model. So they use only
``-``, ``%``, ``//``, ``<``, ``>=``, ``|``, ``&``, `abs` and `equal`.

A new pattern needs a name in `Pattern` and a condition in `conditions`; CONTRIBUTING.md lists the checks and labels
that it also needs. tests/ir/schema/test_visible_keys.py checks three properties for every name. The conditions of a
pattern together depend on both `query` and `key`: ONNX Runtime requires a mask [queries, keys]. A query sees its own
position: v-bias-to-o-bias relies on attention weights that sum to 1. A shift of both positions by `stride` changes
nothing: views of receptive fields rely on it, `_earliest` in backends/viz/panels/mask_panel.py. Kernels that skip keys
name the patterns that they support, and leave others to masks.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np

Pattern = Literal["dense", "dilated", "strided", "fixed", "chunked"]
PATTERNS: tuple[str, ...] = get_args(Pattern)


@dataclass(frozen=True)
class VisibleKeys:
    """The attributes of `attention` that mask keys. The query at position i sees the key at position j if all these
    hold:

    - `causal`: i ≥ j,
    - `window`: |i − j| < window,
    - `pattern`: dense (no condition); dilated (i − j is divisible by `stride`); strided (|i − j| < stride, or i − j is
      divisible by stride; Child 2019, arXiv 1904.10509); fixed (i and j are in the same block of `stride` positions, or
      j is among the last `summary` of its block; Child 2019); chunked (i and j are in the same block; Llama 4).

    Window and pattern do not mask the first `keep_first` keys of a sequence (Xiao 2023, arXiv 2309.17453).
    """

    causal: bool = False
    window: int | None = None
    keep_first: int = 0
    pattern: str = "dense"
    stride: int = 1
    summary: int = 1

    @classmethod
    def from_attrs(cls, attrs: Mapping[str, Any]) -> VisibleKeys:
        """Return the `VisibleKeys` with the attributes `attrs` of a node; attributes not in `attrs` get defaults."""
        return cls(**{f.name: attrs[f.name] for f in fields(cls) if f.name in attrs})

    @property
    def is_local(self) -> bool:
        """True if a window or a pattern masks keys."""
        return self.window is not None or self.pattern != "dense"

    def conditions(self, query: Any, key: Any, equal: Callable[[Any, Any], Any] = operator.eq) -> list[Any]:
        """Return bool conditions on the positions `query` and `key`, causality last; a key is visible if all hold.

        `equal` compares elements, since ``==`` compares the identity of graph values.
        """
        near: list[Any] = []
        distance = query - key
        size = distance if self.causal else abs(distance)  # causality is a condition of its own, below
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
        else:
            assert self.pattern == "dense", self.pattern
        # Before causality is added, which also applies to the first keys.
        if self.keep_first and near:
            near = [functools.reduce(operator.and_, near) | (key < self.keep_first)]
        return [*near, query >= key] if self.causal else near

    def mask(self, query: np.ndarray[Any, Any], key: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the mask: True where queries at positions `query` see keys at positions `key`, which broadcast."""
        everything = np.ones(np.broadcast_shapes(query.shape, key.shape), np.bool_)
        return functools.reduce(np.logical_and, self.conditions(query, key), everything)

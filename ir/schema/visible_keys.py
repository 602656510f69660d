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

from ..types import sizes
from ..types.sizes import Size

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


@dataclass(frozen=True)
class VisibleBlocks:
    """The attributes of `block_sparse_attention` that mask keys, in blocks of `block` tokens (the last may be shorter).

    The first `first` and the last `last` blocks are global: their queries see all keys, and all queries see their keys.
    Queries of a block that is not global also see their own block and `sides` blocks before and after it. A key of the
    first `first` blocks counts `first_weight` times for queries of blocks that are not global. In sequences of at most
    `dense` tokens every query sees every key, once.
    """

    block: int
    sides: int = 1
    first: int = 1
    last: int = 1
    first_weight: int = 1
    dense: int = 0

    @classmethod
    def from_attrs(cls, attrs: Mapping[str, Any]) -> VisibleBlocks:
        """Return the `VisibleBlocks` with the attributes `attrs` of a node."""
        return cls(**{f.name: attrs[f.name] for f in fields(cls)})

    def find_problem(self) -> str | None:
        """Return an error message about the first attribute out of range; None if all are in range."""
        for name, least in {"block": 1, "sides": 0, "first": 0, "last": 0, "first_weight": 1, "dense": 0}.items():
            if getattr(self, name) < least:
                return f"{name}={getattr(self, name)} must be at least {least}"
        if self.first_weight > 1 and not self.first:
            return f"first_weight={self.first_weight} is for first blocks, and first=0"
        return None

    @property
    def global_count(self) -> int:
        """The number of global blocks, `first` + `last`, in sequences with that number of blocks."""
        return self.first + self.last

    def count_blocks(self, length: Size) -> Size:
        """Return the number of blocks in a sequence of `length` tokens."""
        return sizes.floordiv(length + self.block - 1, self.block)

    def is_sparse(self, length: Size) -> Size:
        """Return 1 if `length` tokens are more than `dense`, else 0; in the second case every query sees every key."""
        return sizes.minimum(1, sizes.floordiv(length, self.dense + 1)) if self.dense else 1

    def count_gathered(self, length: Size) -> Size:
        """Return the number of blocks of keys, masked ones included, that the body of the op gathers for a block of
        queries in addition to the global blocks."""
        sparse = self.is_sparse(length)
        return sparse * (2 * self.sides + 1) + (1 - sparse) * self.count_blocks(length)

    def counts(self, length: int) -> np.ndarray[Any, Any]:
        """Return how often each query counts each key, float64 [length, length] (queries, keys): 0 where masked."""
        if length <= self.dense:
            return np.ones((length, length))
        at, blocks = np.arange(length) // self.block, -(-length // self.block)
        ends = (at < self.first) | (at >= blocks - self.last)
        near = abs(at[:, None] - at) <= self.sides
        weights = np.where(at < self.first, self.first_weight, 1)
        return np.where(ends[:, None], 1, (near | ends) * weights)

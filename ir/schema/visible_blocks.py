"""The block mask of block-sparse attention: the blocks of keys that are visible to a block of queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..types import sizes
from ..types.sizes import Size


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

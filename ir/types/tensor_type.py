"""The type of a value: element type and shape."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from . import sizes
from .dtypes import DType
from .sizes import Size

Shape = tuple[Size, ...]


@dataclass(frozen=True)
class TensorType:
    """The type of a dense tensor: `dtype` and `shape`, whose sizes are integers or symbolic (see `sizes`)."""

    dtype: DType
    shape: Shape

    def __str__(self) -> str:
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def elements(self) -> Size:
        return _elements(self.shape)

    @property
    def bytes(self) -> Size:
        """Bytes in memory, rounded up to full bytes; with a symbolic shape rounded down."""
        return _bytes(self)

    def with_shape(self, *shape: Size) -> TensorType:
        return replace(self, shape=tuple(shape))

    def with_axis(self, axis: int, *sizes: Size) -> TensorType:
        """Return this type with the size of `axis` (non-negative) replaced by `sizes`: none, one or several axes."""
        return self.with_shape(*self.shape[:axis], *sizes, *self.shape[axis + 1 :])

    def with_dtype(self, dtype: DType) -> TensorType:
        return replace(self, dtype=dtype)

    def concrete(self, binding: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape as integers, with names replaced by `binding`; raise WeftError if a name is missing."""
        return tuple(sizes.evaluate(s, binding) for s in self.shape)


@functools.lru_cache(maxsize=1 << 12)  # layers have the same types over and over
def _elements(shape: Shape) -> Size:
    return sizes.multiply_sizes(shape)


@functools.lru_cache(maxsize=1 << 12)
def _bytes(kind: TensorType) -> Size:
    n = kind.elements
    return kind.dtype.bytes_for(n) if isinstance(n, int) else sizes.floordiv(n * kind.dtype.bits, 8)

"""Checks and computations that the type functions of ops share: conditions, fixed sizes, broadcasting, axes."""

from __future__ import annotations

from ..errors import WeftError
from ..types import Shape, TensorType
from ..types.sizes import Size


def require(condition: bool, message: str) -> None:
    """Raise WeftError with `message` unless `condition` is true."""
    if not condition:
        raise WeftError(message)


def require_int(size: Size, message: str) -> int:
    """Return `size` if it is an int; raise WeftError with `message` if it is symbolic."""
    if not isinstance(size, int):
        raise WeftError(message)
    return size


def broadcast_shapes(*operands: TensorType | None) -> Shape:
    """Return the shape to which `operands` (None: skipped) broadcast, as in NumPy; WeftError if they do not.
    A symbolic size matches itself and 1."""
    shapes = [t.shape for t in operands if t is not None]
    rank = max(map(len, shapes))
    out: list[Size] = []
    for i in range(rank):
        common: Size = 1
        for s in shapes:
            size = s[i - rank + len(s)] if i - rank + len(s) >= 0 else 1
            if size != 1 and common != 1 and size != common:
                raise WeftError(f"shapes {' and '.join(format_shape(s) for s in shapes)} do not broadcast")
            common = size if size != 1 else common
        out.append(common)
    return tuple(out)


def format_shape(shape: Shape) -> str:
    """Format a shape: [batch, seq, 64]."""
    return f"[{', '.join(map(str, shape))}]"


def normalize_axis(axis: int, rank: int) -> int:
    """Return `axis` as a non-negative index, 0 to rank − 1; raise WeftError if it is not in [−rank, rank)."""
    require(-rank <= axis < rank, f"axis {axis} is out of range for rank {rank}")
    return axis % rank

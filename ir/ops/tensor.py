"""Ops that change shapes or move data."""

from __future__ import annotations

import numpy as np

from ..op import Array, Cost, OpCall, Shape, Size, TensorType, Trait, Value, op
from ..schema.cases import case, ints, normal
from ..schema.checks import broadcast_shapes, format_shape, normalize_axis, require
from ..types import dtypes, sizes
from ..types.sizes import sum_sizes


@op(traits=[Trait.VIEW], cases=[case(normal(2, 3, 8), shape=(2, 3, 2, 4)), case(normal(2, 6), shape=(12,))])
def reshape(x: Array, *, shape: Shape) -> Array:
    """The elements of x in row-major order as `shape`."""
    return x.reshape([int(str(s)) for s in shape])


@reshape.infer
def _(n: OpCall) -> TensorType:
    x: TensorType = n.x
    fits = sizes.multiply_sizes(n.shape) == x.elements
    require(fits, f"cannot reshape {x} to {format_shape(n.shape)}: the element counts differ")
    return x.with_shape(*n.shape)


@op(traits=[Trait.COPY], cases=[case(normal(2, 3, 4), axes=(1, 0, 2)), case(normal(2, 3), axes=(1, 0))])
def transpose(x: Array, *, axes: tuple[int, ...]) -> Array:
    """x with its axes permuted: axis i of the result is axis `axes[i]` of x."""
    return x.transpose(axes)


@transpose.infer
def _(n: OpCall) -> TensorType:
    x: TensorType = n.x
    require(sorted(n.axes) == list(range(x.rank)), f"axes {list(n.axes)} are not a permutation of the axes of {x}")
    return x.with_shape(*(x.shape[a] for a in n.axes))


@op(traits=[Trait.VIEW], cases=[case(normal(2, 1, 3), axes=(1,)), case(normal(1, 3), axes=(0,))])
def squeeze(x: Array, *, axes: tuple[int, ...]) -> Array:
    """x without its `axes`, which must have size 1."""
    return x.squeeze(axes)


@squeeze.infer
def _(n: OpCall) -> TensorType:
    x: TensorType = n.x
    gone = {normalize_axis(a, x.rank) for a in n.axes}
    require(all(x.shape[a] == 1 for a in gone), f"axes {list(n.axes)} of {x} are not all of size 1")
    return x.with_shape(*(s for i, s in enumerate(x.shape) if i not in gone))


@op(traits=[Trait.VIEW], cases=[case(normal(2, 3), axes=(1,)), case(normal(3), axes=(0, 2))])
def unsqueeze(x: Array, *, axes: tuple[int, ...]) -> Array:
    """x with new axes of size 1, whose positions in the result are `axes` (non-negative)."""
    return np.expand_dims(x, axes)


@unsqueeze.infer
def _(n: OpCall) -> TensorType:
    x: TensorType = n.x
    rank = x.rank + len(n.axes)
    fits = len(set(n.axes)) == len(n.axes) and all(0 <= a < rank for a in n.axes)
    require(fits, f"axes {list(n.axes)} do not fit {x}")
    rest = iter(x.shape)
    return x.with_shape(*(1 if i in n.axes else next(rest) for i in range(rank)))


@op(traits=[Trait.COPY], cases=[case(normal(1, 3), shape=(2, 4, 3)), case(normal(2, 1), shape=(2, 5))])
def expand(x: Array, *, shape: Shape) -> Array:
    """x broadcast to `shape`."""
    return np.broadcast_to(x, [int(str(s)) for s in shape])


@expand.infer
def _(n: OpCall) -> TensorType:
    expanded: TensorType = n.x.with_shape(*n.shape)
    require(broadcast_shapes(n.x, expanded) == n.shape, f"{n.x} does not broadcast to {format_shape(n.shape)}")
    return expanded


@op(
    traits=[Trait.COPY],
    cases=[case(normal(2, 3), normal(2, 5), axis=1), case(normal(1, 4), normal(2, 4), normal(3, 4), axis=0)],
)
def concat(*xs: Array, axis: int) -> Array:
    """Concatenation of `xs` along `axis`."""
    return np.concatenate(xs, axis)


@concat.infer
def _(n: OpCall) -> TensorType:
    require(bool(n.xs), "nothing to concatenate")
    first: TensorType = n.xs[0]
    a = normalize_axis(n.axis, first.rank)
    for x in n.xs:
        require(x.rank == first.rank and x.with_axis(a) == first.with_axis(a), f"{x} does not join {first}")
    return first.with_axis(a, sum_sizes([x.shape[a] for x in n.xs]))


@op(traits=[Trait.COPY], cases=[case(normal(2, 9), sizes=(4, 3, 2), axis=-1), case(normal(6, 2), sizes=(1, 5), axis=0)])
def split(x: Array, *, sizes: tuple[int, ...], axis: int = -1) -> tuple[Array, ...]:
    """x cut along `axis` into consecutive pieces of the given `sizes`, which must add up to the size of the axis."""
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis))


@split.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    a = normalize_axis(n.axis, n.x.rank)
    require(n.x.shape[a] == sum_sizes(n.sizes), f"pieces {list(n.sizes)} do not add up to axis {n.axis} of {n.x}")
    return tuple(n.x.with_axis(a, s) for s in n.sizes)


@op(
    traits=[Trait.COPY],
    cases=[case(normal(2, 9), axis=1, start=2, stop=7), case(normal(6, 2), axis=0, start=1, stop=6, step=2)],
)
def slice_(x: Array, *, axis: int, start: int, stop: int, step: int = 1) -> Array:
    """x[start:stop:step] along `axis`; the bounds are non-negative."""
    return x[(slice(None),) * (axis % x.ndim) + (slice(start, stop, step),)]


@slice_.infer
def _(n: OpCall) -> TensorType:
    x: TensorType = n.x
    a = normalize_axis(n.axis, x.rank)
    size = x.shape[a]
    require(0 <= n.start < n.stop and n.step >= 1, f"{n.start}:{n.stop}:{n.step} is not a range")
    require(not isinstance(size, int) or n.stop <= size, f"{n.start}:{n.stop} exceeds axis {n.axis} of {x}")
    return x.with_axis(a, len(range(n.start, n.stop, n.step)))


@op(cases=[case(normal(5, 3), ints(2, 4, high=5)), case(normal(2, 5, 3), ints(4, high=5), axis=1)])
def gather(x: Array, indices: Array, *, axis: int = 0) -> Array:
    """x at integer `indices` along `axis`; the axes of indices replace that axis in the result."""
    return np.take(x, indices, axis)


@gather.infer
def _gather_type(n: OpCall) -> TensorType:
    x: TensorType = n.x
    a = normalize_axis(n.axis, x.rank)
    require(n.indices.dtype.is_int, f"indices {n.indices} must be integers")
    return x.with_axis(a, *n.indices.shape)


def count_gather(result: TensorType, indices: TensorType) -> Cost:
    """Return the cost of a gather that reads `indices` and the elements of `result`, and writes `result`."""
    return Cost(0, result.bytes + indices.bytes, result.bytes)


gather.cost(lambda n: count_gather(_gather_type(n), n.indices))


@op(cases=[case(normal(3, 5, 2), ints(3, 4, high=5)), case(normal(3, 5), ints(3, 1, high=5))])
def gather_rows(x: Array, indices: Array) -> Array:
    """x[b, indices[b]] for every batch row b: x [batch, n, ...], indices [batch, m] → [batch, m, ...]."""
    return np.stack([x[b, i] for b, i in enumerate(indices)]) if len(x) else x[:, :0]


@gather_rows.infer
def _gather_rows_type(n: OpCall) -> TensorType:
    x: TensorType = n.x
    at: TensorType = n.indices
    require(at.dtype.is_int, f"indices {at} must be integers")
    require(x.rank >= 2 and at.rank == 2 and x.shape[0] == at.shape[0], f"{at} does not index rows of {x}")
    return x.with_shape(*at.shape, *x.shape[2:])


gather_rows.cost(lambda n: count_gather(_gather_rows_type(n), n.indices))


@op(
    cases=[
        case(normal(2, 5, 3), normal(2, 2, 3), np.array([[4, 0], [1, 2]])),
        case(normal(2, 3, 6, 4), normal(2, 3, 2, 4), np.array([[4, 5], [1, 2]]), axis=2),
    ]
)
def scatter_rows(x: Array, rows: Array, indices: Array, *, axis: int = 1) -> Array:
    """x [batch, …, n, …] with rows[b] written at the indices[b] of `axis`, for each batch row b: rows [batch, …, m, …],
    indices [batch, m]. Of equal indices the last is written."""
    y = np.moveaxis(x, axis, 1).copy()
    for b, row in enumerate(np.moveaxis(rows, axis, 1)):
        y[b, indices[b]] = row
    return np.moveaxis(y, 1, axis)


@scatter_rows.infer
def _(n: OpCall) -> None:
    x, rows, at, axis = n.x, n.rows, n.indices, n.axis
    require(at.dtype.is_int and at.rank == 2, f"indices {at} must be integers [batch, m]")
    require(0 < axis < x.rank, f"axis={axis} must be one of the axes after the batch of {x}")
    fits = rows == x.with_axis(axis, at.shape[1]) and at.shape[0] == x.shape[0]
    require(fits, f"rows {rows} at {at} do not fit axis {axis} of {x}")


scatter_rows.cost(lambda n: Cost(0, n.rows.bytes + n.indices.bytes, n.rows.bytes))


@op(cases=[case(normal(2, 5, 3), axis=1), case(normal(4), axis=0)])
def iota(x: Array, *, axis: int) -> Array:
    """0, 1, …, n − 1, i64 [n], for the size n of `axis` of x, of which only the shape is read."""
    return np.arange(x.shape[axis])


@iota.infer
def _iota_type(n: OpCall) -> TensorType:
    return TensorType(dtypes.i64, (n.x.shape[normalize_axis(n.axis, n.x.rank)],))


iota.cost(lambda n: Cost(0, 0, _iota_type(n).bytes))


@op(cases=[case(ints(2, 3, high=4), depth=4), case(ints(5, high=3), depth=6)])
def one_hot(ids: Array, *, depth: int) -> Array:
    """One-hot vectors of ids [...], f32 [..., depth]: 1 at index id, else 0."""
    return np.asarray(ids[..., None] == np.arange(depth), np.float64)


@one_hot.infer
def _(n: OpCall) -> TensorType:
    require(n.ids.dtype.is_int, f"ids {n.ids} must be integers")
    return TensorType(dtypes.f32, (*n.ids.shape, n.depth))


@op(
    traits=[Trait.COPY],
    cases=[case(normal(2, 5), axis=1, before=2, after=1), case(normal(3), axis=0, before=0, after=2, value=1.5)],
)
def pad(x: Array, *, axis: int, before: int = 0, after: int = 0, value: float = 0.0) -> Array:
    """x padded with `value`: `before` elements before and `after` elements after it along `axis`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (before, after)
    return np.pad(x, widths, constant_values=value)


@pad.infer
def _(n: OpCall) -> TensorType:
    x: TensorType = n.x
    a = normalize_axis(n.axis, x.rank)
    return x.with_axis(a, x.shape[a] + (n.before + n.after))


# -- compositions


def emit_indices(x: Value, size: Size, name: str | None = None) -> Value:
    """Emit 0, 1, …, size − 1, i64 [size], for any `size`; x is any value with an axis, of which no element is read."""
    zero = slice_(iota(x, axis=x.type.rank - 1), axis=0, start=0, stop=1, name="zero")
    return iota(expand(zero, shape=(size,), name="zeros"), axis=0, name=name)


def swap_last_axes(x: Value) -> Value:
    """Emit x with its last two axes exchanged."""
    rank = len(x.shape)
    return transpose(x, axes=(*range(rank - 2), rank - 1, rank - 2))


def split_heads(x: Value, heads: int) -> Value:
    """Emit x [batch, n, heads·d] as [batch, heads, n, d]."""
    return transpose(reshape(x, shape=(*x.shape[:2], heads, x.width // heads)), axes=(0, 2, 1, 3))


def merge_heads(x: Value) -> Value:
    """Emit x [batch, heads, n, d] as [batch, n, heads·d]."""
    batch, heads, n, d = x.shape
    return reshape(transpose(x, axes=(0, 2, 1, 3)), shape=(batch, n, heads * d))

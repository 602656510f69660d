"""The recipes: reading checkpoint tensors, random and literal values, moving data, arithmetic."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.random import Generator, default_rng  # at import: loading it at the first draw would swallow a Ctrl-C

from ..errors import WeftError
from .readers import Array, TensorReader
from .recipe import Recipe as Recipe  # exported here as well, with its subclasses


class Source(Recipe):
    """The checkpoint tensor called `key`."""

    key: str

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return reader.shape(self.key)

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        return reader.read(self.key, start, stop)

    def sources(self) -> Iterator[str]:
        yield self.key

    def substitute(self, table: Mapping[str, Recipe]) -> Recipe:
        return table.get(self.key, self)


class Literal(Recipe):
    """A literal tensor: `values` in row-major order, of shape `dims`. If it is `replaceable`, a session of an ONNX
    model may replace it by other values, any number of them along the last axis."""

    trained: ClassVar[bool] = False
    values: tuple[float | int | bool, ...]
    dims: tuple[int, ...] = ()
    replaceable: bool = False

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        if math.prod(self.dims) != len(self.values):
            raise WeftError(
                f"a literal of shape {list(self.dims)} has {len(self.values)} values, not {math.prod(self.dims)}"
            )
        return self.dims

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        array = np.array(self.values)
        return array.reshape(self.dims)[start:stop] if self.dims else array

    @staticmethod
    def from_array(array: Any) -> Literal:
        """Return a literal with the values and shape of `array` (anything that np.asarray accepts)."""
        a = np.asarray(array)
        return Literal(tuple(a.reshape(-1).tolist()), a.shape)


class Full(Recipe):
    """A tensor of shape `dims` filled with `value`."""

    value: float
    dims: tuple[int, ...]

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return self.dims

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        return np.full((stop - start, *self.dims[1:]), self.value, np.float32)


class Normal(Recipe):
    """Random initialization: normal values with mean `mean` and standard deviation `std`.

    Each chunk of rows has a generator, seeded with `seed`, the name `stream` and the index of the chunk, so that any
    rows can be drawn without the others.
    """

    dims: tuple[int, ...]
    std: float
    stream: str
    seed: int = 0
    mean: float = 0.0

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return self.dims

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        drawn = _draw_rows(self, start, stop, Generator.standard_normal)
        return drawn * np.float32(self.std) + np.float32(self.mean)


class Uniform(Recipe):
    """Random initialization: values uniform between `low` and `high`, with `seed` and `stream` as in `Normal`."""

    dims: tuple[int, ...]
    low: float
    high: float
    stream: str
    seed: int = 0

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return self.dims

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        drawn = _draw_rows(self, start, stop, Generator.random)
        return drawn * np.float32(self.high - self.low) + np.float32(self.low)


RANDOM = (Normal, Uniform)


def _draw_rows(recipe: Normal | Uniform, start: int, stop: int, draw: Callable[..., Array]) -> Array:
    """Return rows ``start:stop`` of `recipe`, f32; `draw(generator, shape, dtype)` draws the standard distribution."""
    width = math.prod(recipe.dims[1:])
    chunk = max(1, 65_536 // max(1, width))  # rows with one generator, drawn from the first, so that slices agree
    key = zlib.crc32(recipe.stream.encode())  # hash() differs from process to process
    out = np.empty((stop - start, width), np.float32)
    for c in range(start // chunk, -(-stop // chunk)):
        first, last = max(start, c * chunk), min(stop, (c + 1) * chunk)
        drawn = draw(default_rng((recipe.seed, key, c)), (last - c * chunk, width), np.float32)
        out[first - start : last - start] = drawn[first - c * chunk : last - c * chunk]
    return out.reshape(stop - start, *recipe.dims[1:])


class Concat(Recipe):
    """`items` concatenated along `axis`."""

    items: tuple[Recipe, ...]
    axis: int = 0

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        shapes = [p.shape(reader) for p in self.items]
        rest = {(*s[: self.axis], *s[self.axis + 1 :]) for s in shapes}
        if len(rest) != 1 or any(not 0 <= self.axis < len(s) for s in shapes):
            names = " and ".join(p.label(reader) for p in self.items)
            raise WeftError(f"cannot concatenate {names} along axis {self.axis}: the other axes differ")
        total = sum(s[self.axis] for s in shapes)
        return (*shapes[0][: self.axis], total, *shapes[0][self.axis + 1 :])

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        if self.axis:
            return np.concatenate([p.read(reader, start, stop) for p in self.items], self.axis)
        blocks, offset = [], 0
        for p in self.items:
            rows = p.shape(reader)[0]
            first, last = max(start - offset, 0), min(stop - offset, rows)
            if first < last:
                blocks.append(p.read(reader, first, last))
            offset += rows
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


class Slice(Recipe):
    """Every `step`-th index of ``start:stop`` along `axis` of `item`."""

    item: Recipe
    axis: int
    start: int
    stop: int
    step: int = 1

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        shape = self.item.shape(reader)
        if self.axis >= len(shape) or not 0 <= self.start < self.stop <= shape[self.axis]:
            raise WeftError(f"cannot take {self.start}:{self.stop} along axis {self.axis} of {self.item.label(reader)}")
        return (*shape[: self.axis], len(range(self.start, self.stop, self.step)), *shape[self.axis + 1 :])

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        if self.axis == 0:
            first, last = self.start + start * self.step, self.start + (stop - 1) * self.step + 1
            return self.item.read(reader, first, last)[:: self.step]
        index = (slice(None),) * self.axis + (slice(self.start, self.stop, self.step),)
        return self.item.read(reader, start, stop)[index]


class Permute(Recipe):
    """`item` with its axes permuted: axis i of the result is axis `axes[i]` of `item` (``(1, 0)`` transposes)."""

    item: Recipe
    axes: tuple[int, ...]

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        shape = self.item.shape(reader)
        if sorted(self.axes) != list(range(len(shape))):
            raise WeftError(f"axes {list(self.axes)} are not a permutation of the axes of {self.item.label(reader)}")
        return tuple(shape[a] for a in self.axes)

    @property
    def needs_full_read(self) -> bool:
        return self.axes[0] != 0 or self.item.needs_full_read

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        if self.axes[0] == 0:
            return self.item.read(reader, start, stop).transpose(self.axes)
        cut = (slice(None),) * self.axes[0] + (slice(start, stop),)
        columns = [np.ascontiguousarray(b[cut]) for b in self.item.blocks(reader)]  # a view would keep the block alive
        return np.concatenate(columns).transpose(self.axes)


class Reshape(Recipe):
    """`item` reshaped to `dims` in row-major order; a last size of -1 is inferred."""

    item: Recipe
    dims: tuple[int, ...]

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        inner = self.item.shape(reader)
        dims = self.dims
        if dims and dims[-1] == -1:
            dims = (*dims[:-1], math.prod(inner) // max(1, math.prod(dims[:-1])))
        if math.prod(inner) != math.prod(dims):
            raise WeftError(f"cannot reshape {self.item.label(reader)} to {list(self.dims)}: element counts differ")
        return dims

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        inner, dims = self.item.shape(reader), self.shape(reader)
        row_in, row_out = math.prod(inner[1:]), math.prod(dims[1:])
        first, last = start * row_out // row_in, -(-stop * row_out // row_in)
        rows = self.item.read(reader, first, last) if inner else self.item.evaluate(reader)
        flat = rows.reshape(-1)[start * row_out - first * row_in :][: (stop - start) * row_out]
        return flat.reshape(stop - start, *dims[1:])


class Take(Recipe):
    """`item` at the `indices` along `axis`: permutations, gathers, repeats."""

    item: Recipe
    indices: tuple[int, ...]
    axis: int = 0

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        shape = self.item.shape(reader)
        if self.axis >= len(shape) or not all(0 <= i < shape[self.axis] for i in self.indices):
            raise WeftError(f"cannot take indices beyond axis {self.axis} of {self.item.label(reader)}")
        return (*shape[: self.axis], len(self.indices), *shape[self.axis + 1 :])

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        if self.axis:
            return np.asarray(np.take(self.item.read(reader, start, stop), self.indices, self.axis))
        return _gather_rows(self.item, reader, np.array(self.indices[start:stop]))


class Shuffle(Recipe):
    """`item` with the indices start:stop along `axis` in a random order, which depends on `seed` and stop - start."""

    item: Recipe
    axis: int
    start: int
    stop: int
    seed: int = 0

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        shape = self.item.shape(reader)
        if self.axis >= len(shape) or not 0 <= self.start < self.stop <= shape[self.axis]:
            part = f"{self.start}:{self.stop} along axis {self.axis}"
            raise WeftError(f"cannot shuffle {part} of {self.item.label(reader)}")
        return shape

    def order(self, count: int) -> Array:
        """Return the order of all `count` indices of the axis: index i of the result is index order[i] of `item`."""
        drawn = default_rng(self.seed).permutation(self.stop - self.start) + self.start
        return np.concatenate([np.arange(self.start), drawn, np.arange(self.stop, count)])

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        order = self.order(self.item.shape(reader)[self.axis])
        if self.axis:
            return np.asarray(np.take(self.item.read(reader, start, stop), order, self.axis))
        return _gather_rows(self.item, reader, order[start:stop])


def _gather_rows(item: Recipe, reader: TensorReader, rows: Array) -> Array:
    """Return the rows `rows` of `item`, in this order; read them as one range or, if they are sparse, in runs."""
    low, high = int(rows.min()), int(rows.max()) + 1
    if item.needs_full_read or high - low <= 2 * len(rows):
        return np.asarray(item.read(reader, low, high)[rows - low])
    sorted_ = np.unique(rows)
    runs = np.split(sorted_, np.flatnonzero(np.diff(sorted_) > 1) + 1)
    values = np.concatenate([item.read(reader, int(run[0]), int(run[-1]) + 1) for run in runs])
    return np.asarray(values[np.searchsorted(sorted_, rows)])


class Scale(Recipe):
    """`item` times `factor`: a number, or a recipe of a vector along `axis`."""

    item: Recipe
    factor: float | Recipe
    axis: int = 0

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        shape = self.item.shape(reader)
        if isinstance(self.factor, Recipe) and self.factor.shape(reader) != (shape[self.axis],):
            raise WeftError(
                f"cannot scale axis {self.axis} of {self.item.label(reader)} by {self.factor.label(reader)}"
            )
        return shape

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        rows = self.item.read(reader, start, stop)
        if not isinstance(self.factor, Recipe):
            return rows * self.factor
        vector = self.factor.read(reader, start, stop) if self.axis == 0 else self.factor.evaluate(reader)
        return rows * vector.reshape((1,) * self.axis + (-1,) + (1,) * (rows.ndim - self.axis - 1))


class Add(Recipe):
    """The sum of the tensors `items`, all of one shape, plus the number `offset`."""

    items: tuple[Recipe, ...]
    offset: float = 0.0

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        shapes = {p.shape(reader) for p in self.items}
        if len(shapes) != 1:
            raise WeftError(f"cannot add {' and '.join(p.label(reader) for p in self.items)}: shapes differ")
        return shapes.pop()

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        total = self.items[0].read(reader, start, stop)
        for p in self.items[1:]:
            total = total + p.read(reader, start, stop)
        return total + self.offset if self.offset else total


class Map(Recipe):
    """`item` with the function called `fn`, a key of `MAPS`, applied to every element."""

    item: Recipe
    fn: str

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        if self.fn not in MAPS:
            raise WeftError(f"unknown function {self.fn!r} in a map recipe; known are {', '.join(MAPS)}")
        return self.item.shape(reader)

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        return MAPS[self.fn](self.item.read(reader, start, stop))


MAPS: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "reciprocal": np.reciprocal,
    "cos": np.cos,
    "sin": np.sin,
    "inverse_softplus": lambda x: x + np.log(-np.expm1(-x)),  # log(exp(x) − 1) without overflow
}


class MeanPool(Recipe):
    """Means [groups·dim, ...] of `groups` equal runs of adjacent heads of `item` [heads·dim, ...] (Ainslie 2023)."""

    item: Recipe
    heads: int
    groups: int

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        shape = self.item.shape(reader)
        if self.heads % self.groups or shape[0] % self.heads:
            raise WeftError(f"cannot pool {self.heads} heads of {self.item.label(reader)} into {self.groups} groups")
        return (shape[0] // self.heads * self.groups, *shape[1:])

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        shape = self.item.shape(reader)
        dim, members = shape[0] // self.heads, self.heads // self.groups
        first, last = start // dim, -(-stop // dim)
        rows = self.item.read(reader, first * members * dim, last * members * dim)
        pooled = rows.reshape(last - first, members, dim, *shape[1:]).mean(1, dtype=rows.dtype)
        return np.asarray(pooled.reshape(-1, *shape[1:])[start - first * dim : stop - first * dim])


class Cast(Recipe):
    """`item` rounded to `dtype` and converted back, as if it were stored in fewer bits."""

    item: Recipe
    dtype: str

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        from ..types import dtypes

        rows = self.item.read(reader, start, stop)
        return rows.astype(dtypes.parse(self.dtype).numpy).astype(rows.dtype)

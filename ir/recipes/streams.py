"""Stream the elements of a recipe in small blocks, even if each index of its first axis has many elements.

`Recipe.read` reads indices of the first axis. In stacked weights [experts, out, in] each is a large matrix, but this
matrix can mostly be expressed as a recipe (`select_row`), which is read row by row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import WeftError
from ..types import dtypes
from ..types.dtypes import DType
from .blocks import (
    Dequantize,
    Float4,
    Float8,
    InBytes,
    Kept,
    Quantize,
    Stored,
    ToFloat4,
    ToFloat8,
    get_block_layout,
    split_parts,
)
from .combinators import Add, Cast, Concat, Full, Map, Permute, Reshape, Scale, Slice
from .matrices import Centre, MatMul
from .readers import Array, TensorReader
from .recipe import BLOCK_ELEMENTS, Recipe


def stream_rows(recipe: Recipe, reader: TensorReader) -> Iterator[Array]:
    """Yield the elements of `recipe` in row-major order, as blocks of rows: of each matrix of a large stack, or a whole
    matrix if `select_row` returns None. WeftError if a tensor is missing or misshapen."""
    shape = recipe.shape(reader)
    if len(shape) < 3 or math.prod(shape[1:]) <= BLOCK_ELEMENTS:
        yield from recipe.blocks(reader)
        return
    for i in range(shape[0]):
        part = select_row(recipe, reader, i)
        if part is None:
            yield recipe.read(reader, i, i + 1)
        else:
            yield from stream_rows(part, reader)


def cast_finite(values: Array, dtype: DType, name: str) -> Array:
    """Return `values` of the tensor `name` cast to `dtype`, contiguous. If that is a float dtype, raise WeftError if a
    value is NaN, infinite, or out of its range."""
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        stored = np.ascontiguousarray(values.astype(dtype.numpy, copy=False))
    if dtype.is_float:
        check_finite(values, stored, dtype, name)
    return stored


def check_finite(values: Array, stored: Array, dtype: DType, name: str) -> None:
    """Raise WeftError, with the tensor `name` and a value, unless `stored` (= `values` cast to `dtype`) is finite."""
    finite = np.isfinite(stored)
    if finite.all():
        return
    value = float(values[~finite].flat[0])
    if not math.isfinite(value):
        raise WeftError(f"tensor {name!r} holds {value}: the weights are broken; fetch or save them again")
    wider = "bf16 or f32" if np.isfinite(dtypes.bf16.numpy.type(value)) else "f32"
    raise WeftError(f"tensor {name!r} holds {value:g}, beyond the range of {dtype}: choose --dtype {wider}")


def find_stored_part(recipe: Recipe) -> Stored | None:
    """Return the `Stored` recipe that `recipe` is, or that it reshapes; None if there is none."""
    while isinstance(recipe, Reshape):
        recipe = recipe.item
    return recipe if isinstance(recipe, Stored) else None


def stream_parts(parts: Sequence[Stored], reader: TensorReader) -> Iterator[tuple[Array, ...]]:
    """Yield tuples with a block of rows of each of `parts`, in order. All parts must have the same `item`, whose rows
    are read and rounded only once."""
    item, names = parts[0].item, [part.part for part in parts]
    layout, width = get_block_layout(item, reader), item.shape(reader)[-1]
    for rows in stream_rows(Stored(item, "+".join(names)), reader):
        yield split_parts(rows, layout, width, names) if names[1:] else (rows,)


def select_row(recipe: Recipe, reader: TensorReader, index: int) -> Recipe | None:
    """Return a recipe for index `index` of axis 0 of `recipe`, without that axis; None if no recipe expresses it."""
    match recipe:
        case Concat(axis=0):
            for p in recipe.items:
                if index < (rows := p.shape(reader)[0]):
                    return select_row(p, reader, index)
                index -= rows
        case Full(value, dims):
            return Full(value, dims[1:])
        case Reshape():
            return _select_row_of_reshape(recipe, reader, index)
        case MatMul(left):
            part = select_row(left, reader, index)
            return part and replace(recipe, left=part)
        case ToFloat4(tensor_scales=outer):
            return _select_row_of_parts(recipe, reader, index, tensor_scales=outer[index:][:1] if outer[1:] else outer)
        case Scale(item, Recipe(), axis):
            part = select_row(item, reader, index) if axis else None
            return part and replace(recipe, item=part, axis=axis - 1)
        case Slice(axis=axis) | Scale(axis=axis) | Centre(axis=axis) | Concat(axis=axis) if axis > 0:
            return _select_row_of_parts(recipe, reader, index, axis=axis - 1)
        case Permute(axes=(0, *axes)):
            return _select_row_of_parts(recipe, reader, index, axes=tuple(a - 1 for a in axes))
        case (
            Add() | Scale() | Map() | Cast() | Quantize() | Dequantize() | ToFloat8() | Float8() | Float4() | InBytes()
        ):
            return _select_row_of_parts(recipe, reader, index)
        case Kept() | Stored():
            return _select_row_of_parts(recipe, reader, index)
    return None


def _select_row_of_parts(recipe: Recipe, reader: TensorReader, index: int, **fields: Any) -> Recipe | None:
    rows = [select_row(part, reader, index) for part in recipe.parts]
    selected = iter([row for row in rows if row is not None])
    return None if None in rows else replace(recipe.map_parts(lambda _: next(selected)), **fields)


def _select_row_of_reshape(recipe: Reshape, reader: TensorReader, index: int) -> Recipe | None:
    dims, inner = recipe.shape(reader), recipe.item.shape(reader)
    rows, remainder = divmod(inner[0], dims[0])
    if remainder:
        return None
    if rows == 1:
        part = select_row(recipe.item, reader, index)
    else:
        part = Slice(recipe.item, 0, index * rows, (index + 1) * rows) if rows >= dims[1] else None
    return None if part is None else Reshape(part, dims[1:])

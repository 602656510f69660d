"""The elements of a recipe in order, in small blocks even where a row is large: the weights of an expert, for example.

A recipe is read by slices of its first axis. Stacked weights [experts, out, in] have large slices; but a slice of a
stack is usually a recipe itself, which can be read slice by slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..errors import WeftError
from ..types import dtypes
from ..types.block_layouts import BlockLayout
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
    find_block_layout,
    split_parts,
)
from .combinators import Add, Cast, Concat, Full, Map, Permute, Reshape, Scale, Slice
from .matrices import Centre, MatMul
from .readers import Array, TensorReader
from .recipe import BLOCK_ELEMENTS, Recipe


def stream_rows(recipe: Recipe, reader: TensorReader) -> Iterator[Array]:
    """Yield the tensor in row-major order as blocks of rows of one of its axes, each as small as its recipe allows.

    Raises:
        WeftError: if a source is missing or shapes do not fit.
    """
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
    """Cast `values` of the tensor `name` to `dtype`, contiguous: the last step before weights are stored.
    Raises WeftError where a value is NaN, infinite, or beyond the range of `dtype`."""
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        stored = np.ascontiguousarray(values.astype(dtype.numpy, copy=False))
    if dtype.is_float:
        check_finite(values, stored, dtype, name)
    return stored


def check_finite(values: Array, stored: Array, dtype: DType, name: str) -> None:
    """Raise WeftError, naming the tensor and the value, where `stored`, `values` cast to `dtype`, is not finite."""
    finite = np.isfinite(stored)
    if finite.all():
        return
    value = float(values[~finite].flat[0])
    if not math.isfinite(value):
        raise WeftError(f"tensor {name!r} holds {value}: the weights are broken; fetch or save them again")
    wider = "bf16 or f32" if np.isfinite(dtypes.bf16.numpy.type(value)) else "f32"
    raise WeftError(f"tensor {name!r} holds {value:g}, beyond the range of {dtype}: choose --dtype {wider}")


def find_stored_part(recipe: Recipe) -> Stored | None:
    """Return the `Stored` part of blocks that `recipe` reshapes, if it is one, else None."""
    while isinstance(recipe, Reshape):
        recipe = recipe.item
    return recipe if isinstance(recipe, Stored) else None


def stream_parts(parts: Sequence[Stored], reader: TensorReader) -> Iterator[tuple[Array, ...]]:
    """Yield several parts of the blocks of one weight at a time, like `stream_rows`; rows are read and rounded once."""
    item, names = parts[0].item, [part.part for part in parts]
    layout, width = find_block_layout(item, reader), item.shape(reader)[-1]
    assert isinstance(layout, BlockLayout)
    for rows in stream_rows(Stored(item, "+".join(names)), reader):
        yield split_parts(rows, layout, width, names) if names[1:] else (rows,)


def select_row(recipe: Recipe, reader: TensorReader, index: int) -> Recipe | None:
    """Return row `index` of `recipe` as a recipe with one axis less; None where the row can only be read as array."""
    match recipe:
        case Concat(axis=0):
            return _select_row_of_concat(recipe, reader, index)
        case Concat(items, axis):
            arrays = _select_row_of_items(items, reader, index)
            return Concat(arrays, axis - 1) if arrays else None
        case Add(items):
            arrays = _select_row_of_items(items, reader, index)
            return replace(recipe, items=arrays) if arrays else None
        case Full(value, dims):
            return Full(value, dims[1:])
        case Reshape():
            return _select_row_of_reshape(recipe, reader, index)
        case MatMul(left):
            part = select_row(left, reader, index)
            return part and replace(recipe, left=part)
        case Dequantize(codes, scales, zeros):
            arrays = _select_row_of_items((codes, scales) if zeros is None else (codes, scales, zeros), reader, index)
            return _replace_dequantize(recipe, arrays) if arrays else None
        case Float8(codes, scales):
            arrays = _select_row_of_items((codes, scales), reader, index)
            return replace(recipe, codes=arrays[0], scales=arrays[1]) if arrays else None
        case Float4(codes, scales, outer):
            arrays = _select_row_of_items((codes, scales) if outer is None else (codes, scales, outer), reader, index)
            return _replace_float4(recipe, arrays) if arrays else None
        case ToFloat4(item, _, outer):
            part = select_row(item, reader, index)
            return part and replace(recipe, item=part, tensor_scales=outer[index : index + 1] if outer[1:] else outer)
        case Map(item) | Cast(item) | Quantize(item) | ToFloat8(item) | InBytes(item) | Kept(item) | Stored(item):
            part = select_row(item, reader, index)
            return part and replace(recipe, item=part)
        case Slice(item, axis) | Scale(item, _, axis) | Centre(item, axis) if axis > 0:
            part = select_row(item, reader, index)
            return part and replace(recipe, item=part, axis=axis - 1)
        case Scale(item, float()):
            part = select_row(item, reader, index)
            return part and replace(recipe, item=part)
        case Permute(item, (0, *axes)):
            part = select_row(item, reader, index)
            return part and Permute(part, tuple(a - 1 for a in axes))
    return None


def _replace_dequantize(recipe: Dequantize, parts: tuple[Recipe, ...]) -> Recipe:
    codes, scales, *zeros = parts
    return replace(recipe, codes=codes, scales=scales, zeros=zeros[0] if zeros else None)


def _replace_float4(recipe: Float4, parts: tuple[Recipe, ...]) -> Float4:
    codes, scales, *tensor_scales = parts
    return replace(recipe, codes=codes, scales=scales, tensor_scales=tensor_scales[0] if tensor_scales else None)


def _select_row_of_items(items: tuple[Recipe, ...], reader: TensorReader, index: int) -> tuple[Recipe, ...]:
    """Return a recipe for row `index` of every item; () if an item has none."""
    rows = [select_row(p, reader, index) for p in items]
    recipes = tuple(p for p in rows if p is not None)
    return recipes if len(recipes) == len(rows) else ()


def _select_row_of_concat(recipe: Concat, reader: TensorReader, index: int) -> Recipe | None:
    for p in recipe.items:
        rows = p.shape(reader)[0]
        if index < rows:
            return select_row(p, reader, index)
        index -= rows
    return None


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

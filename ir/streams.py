"""The numbers of a recipe in order, in small blocks also where a row is large: the weights of an expert, for example.

A recipe is read by rows of its first axis. Stacked weights [experts, out, in] have few and large ones; but a row of a
stack is mostly a recipe itself, whose own rows can be read alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from .archive import Archive, Array
from .recipe import BLOCK_ELEMENTS, Recipe
from .recipes import Cast, Concat, Full, Map, Reshape, Slice


def stream(recipe: Recipe, archive: Archive) -> Iterator[Array]:
    """The tensor in row-major order as blocks of rows of one of its axes, each as small as its recipe allows.

    Raises:
        WeftError: if a source is missing or shapes do not fit.
    """
    shape = recipe.shape(archive)
    if len(shape) < 3 or math.prod(shape[1:]) <= BLOCK_ELEMENTS:
        yield from recipe.blocks(archive)
        return
    for i in range(shape[0]):
        part = row(recipe, archive, i)
        if part is None:
            yield recipe.read(archive, i, i + 1)
        else:
            yield from stream(part, archive)


def row(recipe: Recipe, archive: Archive, index: int) -> Recipe | None:
    """Row `index` of `recipe` as a recipe of one axis less; None where the row can only be read whole."""
    if isinstance(recipe, Concat):
        if recipe.axis == 0:
            return _within(recipe, archive, index)
        found = [row(p, archive, index) for p in recipe.items]
        known = tuple(p for p in found if p is not None)
        return Concat(known, recipe.axis - 1) if len(known) == len(found) else None
    if isinstance(recipe, Full):
        return Full(recipe.value, recipe.dims[1:])
    if isinstance(recipe, Reshape):
        return _of_reshaped(recipe, archive, index)
    if isinstance(recipe, (Map, Cast)) or (isinstance(recipe, Slice) and recipe.axis > 0):
        part = row(recipe.item, archive, index)
        if part is None:
            return None
        return (
            replace(recipe, item=part, axis=recipe.axis - 1)
            if isinstance(recipe, Slice)
            else replace(recipe, item=part)
        )
    return None


def _within(recipe: Concat, archive: Archive, index: int) -> Recipe | None:
    for p in recipe.items:
        rows = p.shape(archive)[0]
        if index < rows:
            return row(p, archive, index)
        index -= rows
    return None


def _of_reshaped(recipe: Reshape, archive: Archive, index: int) -> Recipe | None:
    dims, inner = recipe.shape(archive), recipe.item.shape(archive)
    rows, left = divmod(inner[0], dims[0])
    if left:
        return None
    if rows == 1:
        part = row(recipe.item, archive, index)
    else:
        part = Slice(recipe.item, 0, index * rows, (index + 1) * rows) if rows >= dims[1] else None
    return None if part is None else Reshape(part, dims[1:])

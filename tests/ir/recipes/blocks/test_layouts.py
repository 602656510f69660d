"""Layouts of the rows of recipes, and the reasons why rows are not blocks."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir.recipes.blocks import Kept, Quantize, find_block_layout
from weft.ir.recipes.blocks.layouts import find_block_leaves, read_leaf_blocks
from weft.ir.recipes.combinators import Concat, Full, Permute, Reshape, Scale, Slice, Source, Take
from weft.ir.recipes.readers import MemoryReader
from weft.ir.recipes.recipe import Recipe

READER = MemoryReader({"w": np.arange(256, dtype=np.float32).reshape(2, 2, 64), "m": np.ones((4, 64), np.float32)})
four, eight = Quantize(Source("m"), 4, 32), Quantize(Source("m"), 8, 32)


@pytest.mark.parametrize(
    "recipe",
    [
        four,
        Kept(four, "fp8"),
        Concat((four, four)),
        Slice(four, 0, 1, 3),
        Take(four, (3, 0)),
        Reshape(four, (2, 2, -1)),
        Permute(Reshape(four, (2, 2, -1)), (1, 0, 2)),
    ],
    ids=lambda recipe: recipe.name,
)
def test_moved_rows_have_the_layout_of_their_leaves(recipe: Recipe) -> None:
    leaves = find_block_leaves(recipe, READER)
    assert not isinstance(leaves, str) and set(leaves) == {four}
    assert find_block_layout(recipe, READER) == four.layout(READER)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (Full(1.0, (4, 64)), "it is not read from a file"),
        (Scale(Full(1.0, (4, 64)), 2.0), "it is not read from a file"),
        (Scale(four, 2.0), "its recipe (scale) does more than move whole rows"),
        (Permute(four, (1, 0)), "its recipe (permute) does more than move whole rows"),
        (Concat((four, four), 1), "its recipe (concat) does more than move whole rows"),
        (Source("m"), "it is stored as f32, not as "),
        (Concat((four, eight)), "its rows are stored in different ways ("),
    ],
)
def test_other_rows_have_a_reason(recipe: Recipe, reason: str) -> None:
    found = find_block_layout(recipe, READER)
    assert isinstance(found, str) and found.startswith(reason)


def test_kept_matrices_are_read_as_they_are() -> None:
    kept = Kept(Source("w"))
    assert kept.shape(READER) == (2, 2, 64)
    np.testing.assert_array_equal(kept.read(READER, 1, 2), READER.arrays["w"][1:2])


def test_block_recipes_dequantize_their_blocks() -> None:
    recipe = Quantize(Source("w"), 8, 32)
    layout = recipe.layout(READER)
    blocks = read_leaf_blocks(recipe, READER, 0, 1)
    np.testing.assert_array_equal(layout.dequantize(blocks), recipe.read(READER, 0, 1))
    np.testing.assert_allclose(recipe.evaluate(READER), READER.arrays["w"], atol=1)
    assert read_leaf_blocks(recipe, READER, 0, 1, codes=False).codes.size == 0

"""The base of recipes: parts, substitution, blocks of rows, names."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np
import pytest

from weft.ir.recipes import recipe as base
from weft.ir.recipes.combinators import Concat, Full, Permute, Scale, Source
from weft.ir.recipes.frequencies import AlibiSlopes
from weft.ir.recipes.readers import EMPTY, MemoryReader
from weft.ir.recipes.recipe import REGISTRY, Recipe, order_fields

READER = MemoryReader({"a": np.arange(20.0).reshape(5, 4), "s": np.array(3.0)})
a, b = Source("a"), Source("b")


def test_names_are_snake_case_and_private_recipes_are_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "REGISTRY", {})

    class RowSum2D(Recipe):
        pass

    class _Hidden(Recipe):
        pass

    assert (RowSum2D.name, _Hidden.name) == ("row_sum2_d", "hidden") and [*base.REGISTRY] == ["row_sum2_d"]
    assert REGISTRY["alibi_slopes"] is AlibiSlopes
    with pytest.raises(TypeError, match="recipe row_sum2_d defines no shape"):
        RowSum2D().evaluate(EMPTY)


def test_parts_are_changed_in_fields_and_tuples() -> None:
    recipe = Scale(Concat((a, b, a)), Source("s"))
    assert recipe.parts == (Concat((a, b, a)), Source("s"))
    assert [*recipe.sources()] == ["a", "b", "a", "s"]
    ones = Full(1.0, (2,))
    assert recipe.substitute({"a": ones}) == Scale(Concat((ones, b, ones)), Source("s"))
    assert recipe.substitute({}) == recipe
    assert recipe.has(Source) and recipe.has(Full, Scale) and not recipe.has(Permute)


def test_integers_in_float_fields_become_floats() -> None:
    assert isinstance(Full(1, (2,)).value, float)


def test_constant_recipes_have_only_constant_leaves() -> None:
    assert AlibiSlopes(4).is_constant and Concat((AlibiSlopes(4), AlibiSlopes(4))).is_constant
    assert not a.is_constant and not Concat((AlibiSlopes(4), a)).is_constant


def test_blocks_are_rows_up_to_a_number_of_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [len(block) for block in a.blocks(READER, 9)] == [2, 2, 1]
    assert [len(block) for block in a.blocks(READER, 1)] == [1] * 5
    np.testing.assert_array_equal(np.concatenate([*a.blocks(READER, 9)]), READER.arrays["a"])
    assert [block.item() for block in Source("s").blocks(READER)] == [3.0]
    assert Source("s").evaluate(READER).shape == ()
    monkeypatch.setattr(base, "BLOCK_ELEMENTS", 4)
    monkeypatch.setattr(base, "SWEEP_ELEMENTS", 10)
    assert len([*a.blocks(READER)]) == 5
    assert len([*Permute(a, (1, 0)).blocks(READER)]) == 2  # a transposition reads all rows for each block


def test_keyword_only_fields_follow_positional_ones() -> None:
    @dataclass(frozen=True)
    class _Mixed:
        first: int
        _: KW_ONLY
        key: int = 0

    assert [f.name for f in order_fields(_Mixed)] == ["first", "key"]

"""The text form of attribute values and recipes."""

from __future__ import annotations

from typing import Any

import pytest

from weft.ir.recipes.combinators import Concat, Slice, Source
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.recipes.spelling import spell, spell_recipe
from weft.ir.types import dtypes
from weft.ir.types.sizes import sym


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        (True, "true"),
        (False, "false"),
        (3, "3"),
        (0.5, "0.5"),
        (1e-6, "1e-06"),
        ('say "hi"', r'"say \"hi\""'),
        ((1, None, "a"), '[1, none, "a"]'),
        ([], "[]"),
        (dtypes.bf16, "bf16"),
        (2 * sym("seq"), "2*seq"),
        (Source("w"), 'source("w")'),
    ],
)
def test_attribute_values_have_a_text_form(value: Any, text: str) -> None:
    assert spell(value) == text


def test_recipes_are_calls_without_default_fields() -> None:
    assert spell_recipe(Slice(Source("w"), 0, 2, 9)) == 'slice(source("w"), axis=0, start=2, stop=9)'
    assert spell_recipe(Slice(Source("w"), 0, 2, 9, 3)).endswith("stop=9, step=3)")
    assert spell_recipe(Concat((Source("a"), Source("b")), 1)) == 'concat([source("a"), source("b")], axis=1)'
    assert spell_recipe(RopeFrequencies(8)) == "rope_frequencies(8)"


def test_other_objects_have_no_text_form() -> None:
    with pytest.raises(TypeError, match="has no text form"):
        spell(object())

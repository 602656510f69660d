"""Read a small config by a family's table, and the tensors of its parameters, without transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

from weft.frontends.models.families import FAMILIES, Settings
from weft.ir import WeftError
from weft.ir.recipes import Recipe
from weft.ir.recipes.readers import MemoryReader

SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 64},
}
ABSENT = object()  # the value of a key of `SIZES` that a config does not have


def read(family: str, *, keys: Iterable[str] = (), **config: Any) -> Settings:
    """Return the settings of `SIZES` with the changes `config`, for a checkpoint with tensors named `keys`.

    The value `ABSENT` in `config` removes a key.
    """
    merged = {name: value for name, value in (SIZES | config).items() if value is not ABSENT}
    return FAMILIES[family].read(merged, frozenset(keys), "config.json")


def refusal(family: str, **config: Any) -> str:
    """Return the message with which the family refuses `SIZES` with the changes `config`."""
    with pytest.raises(WeftError) as e:
        read(family, **config)
    return str(e.value)


def names(family: str, parameter: str, *, keys: Iterable[str] = (), **config: Any) -> list[str]:
    """Return the names of the checkpoint tensors that `parameter` reads."""
    stored = frozenset(keys)
    recipe = FAMILIES[family].recipe(parameter, read(family, keys=stored, **config), stored)
    assert recipe is not None
    return sorted(set(recipe.sources()))


def weight(family: str, parameter: str, tensors: Mapping[str, Any], **config: Any) -> np.ndarray:
    """Return the value of `parameter`, computed from the checkpoint `tensors`."""
    recipe = FAMILIES[family].recipe(parameter, read(family, keys=tensors, **config), frozenset(tensors))
    assert recipe is not None
    return evaluate(recipe, tensors)


def evaluate(recipe: Recipe, tensors: Mapping[str, Any]) -> np.ndarray:
    """Return the value of `recipe`, given the checkpoint `tensors`."""
    reader = MemoryReader({name: np.asarray(x, np.float32) for name, x in tensors.items()})
    return np.asarray(recipe.evaluate(reader))


def counting(*shape: int) -> np.ndarray:
    """Return 0, 1, 2, … in `shape`, so that every element shows where it went."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

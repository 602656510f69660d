"""The text form of attribute values and recipes in a graph."""

from __future__ import annotations

import functools
import json
from dataclasses import MISSING
from typing import Any

from ..types.dtypes import DType
from ..types.sizes import Poly
from .recipe import Recipe, order_fields

_order_fields = functools.cache(order_fields)  # a graph has many recipes of few classes


def spell(value: Any) -> str:
    """Return the text form of an attribute value; raise TypeError if it has none."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(spell, value))}]"
    if isinstance(value, (int, float, Poly)):
        return str(value)
    if isinstance(value, DType):
        return value.name
    if isinstance(value, Recipe):
        return spell_recipe(value)
    if (text := getattr(value, "__spelled__", None)) is not None:  # a graph in a node, see `Step`
        return str(text)
    raise TypeError(f"{value!r} has no text form")


def spell_recipe(recipe: Recipe) -> str:
    """Return the text form of `recipe`: a call with the fields that differ from their defaults, the first field by
    position and others by name."""
    args = []
    kind: Any = type(recipe)
    for i, field in enumerate(_order_fields(kind)):
        value = getattr(recipe, field.name)
        if field.default is MISSING or field.default != value:
            args.append(spell(value) if i == 0 else f"{field.name}={spell(value)}")
    return f"{recipe.name}({', '.join(args)})"

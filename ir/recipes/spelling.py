"""The text form of attribute values and recipes in a graph."""

from __future__ import annotations

import json
from dataclasses import MISSING
from typing import Any

from ..types.dtypes import DType
from ..types.sizes import Poly
from .recipe import Recipe, order_fields


def spell(value: Any) -> str:
    """Return the text form of an attribute value."""
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
    """Return the text form of `recipe`: a call with the first field by position, other fields that differ from their
    defaults by name."""
    args = []
    for i, (name, default) in enumerate(_list_fields(recipe)):
        value = getattr(recipe, name)
        if default is not MISSING and default == value:
            continue
        text = spell(value)
        args.append(text if i == 0 else f"{name}={text}")
    return f"{recipe.name}({', '.join(args)})"


def _list_fields(recipe: Recipe) -> tuple[tuple[str, Any], ...]:
    """Return (name, default) for each field of `recipe` in the order of its constructor; MISSING without a default."""
    kind = type(recipe)
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple((f.name, f.default) for f in order_fields(kind))
    return _FIELDS[kind]


_FIELDS: dict[type[Recipe], tuple[tuple[str, Any], ...]] = {}

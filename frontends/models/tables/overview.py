"""The table that `weft families` and the docs print: each family's class in transformers and its GGUF support."""

from __future__ import annotations

from collections.abc import Mapping

from .family import Family


def tabulate_families(families: Mapping[str, Family]) -> list[tuple[str, str, str]]:
    """Return the titles, then a row (model_type, class, GGUF architecture) per family; "+": weft also exports to it."""
    rows = [("family", "exported", "GGUF")]
    for name, family in sorted(families.items()):
        gguf = "" if family.gguf is None else family.gguf.model_types[0] + ("+" if family.gguf.loader else "")
        rows.append((name, family.transformers, gguf))
    return rows

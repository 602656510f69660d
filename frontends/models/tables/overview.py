"""The table of families, for `weft families` and the docs: the libraries that read and write each."""

from __future__ import annotations

from collections.abc import Mapping

from .family import Family


def tabulate_families(families: Mapping[str, Family]) -> list[tuple[str, str, str]]:
    """Return the table as rows: the column titles, then a row per family, sorted by name."""
    rows = [("family", "exported", "GGUF")]
    for name, family in sorted(families.items()):
        gguf = "" if family.gguf is None else family.gguf.model_types[0] + ("+" if family.gguf.loader else "")
        rows.append((name, family.transformers, gguf))
    return rows

"""The page of supported families says what the tables and the measurements say.

After a change that is meant: ``weft families --write-docs docs/supported.md``, and read the diff.
"""

from __future__ import annotations

from pathlib import Path

from weft.frontends.models.families import FAMILIES
from weft.frontends.models.tables.overview import overview, page
from weft.frontends.models.tables.verified import read_genai, read_verified


def test_the_page_is_generated(root: Path) -> None:
    own = {name: table for name, table in FAMILIES.items() if name in read_verified()}  # none of plugins
    assert (root / "docs" / "supported.md").read_text(encoding="utf-8") == page(own)


def test_every_row_says_what_its_table_does() -> None:
    head, *rows = overview(FAMILIES)
    assert head == ("family", "exported", "GGUF", "genai", "onnx", "ort-cpu", "torch")
    assert len(rows) == len(FAMILIES)
    for name, exported, gguf, genai, *errors in rows:
        table = FAMILIES[name]
        assert exported == table.transformers
        assert gguf.rstrip("+") == ("" if table.gguf is None else table.gguf.model_types[0])
        assert bool(genai) == (name in read_genai())
        assert name not in read_verified() or float(errors[1]) <= 1e-4

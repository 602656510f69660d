"""The table of families follows their tables, and the page of supported families adds what tests measured.

After an intended change: ``python -m tests.supported``, and read the diff.
"""

from __future__ import annotations

from pathlib import Path

from weft.frontends.models.families import FAMILIES
from weft.frontends.models.tables.overview import tabulate_families

from ....supported import page, read_errors, read_genai


def test_supported_page_is_generated(root: Path) -> None:
    assert (root / "docs" / "supported.md").read_text(encoding="utf-8") == page()


def test_overview_rows_follow_the_tables() -> None:
    head, *rows = tabulate_families(FAMILIES)
    assert head == ("family", "exported", "GGUF")
    assert len(rows) == len(FAMILIES)
    for name, exported, gguf in rows:
        table = FAMILIES[name]
        assert exported == table.transformers
        assert gguf.rstrip("+") == ("" if table.gguf is None else table.gguf.model_types[0])


def test_page_rows_show_the_measurements() -> None:
    errors, genai = read_errors(), read_genai()
    table = page().partition("| family |")[2].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:]]
    assert [row[0] for row in rows] == sorted(errors)
    for name, _, _, marked, *worst in rows:
        assert bool(marked) == (name in genai)
        assert [float(e) for e in worst] == [max(errors[name][t].values()) for t in ("onnx", "ort-cpu", "torch")]
        assert float(worst[1]) <= 1e-4

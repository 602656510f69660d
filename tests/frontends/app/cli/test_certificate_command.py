"""`weft certificate`: tables, the page, the exit status."""

from __future__ import annotations

import re
from pathlib import Path

from weft.backends.viz.web.page import render_tables

from ...command import done, refused, weft_command


def test_tables_and_page_state_the_same(compiled_tiny: Path, tmp_path: Path) -> None:
    shown = done("certificate", compiled_tiny).stdout
    assert re.findall(r"^(\w+)\n\n", shown, re.MULTILINE) == ["Record", "Sources", "Passes", "Checks"]
    assert "kv-cache" in shown and re.search(r"^holds +\d+ files have their checksums", shown, re.MULTILINE)
    page = tmp_path / "page.html"
    assert done("certificate", compiled_tiny, "-o", page).stderr == f"weft: {page} written\n"
    text = page.read_text()
    cells = set(re.findall(r"<td[^>]*>([^<]*)", text))
    assert {"kv-cache", "conditional", "holds"} <= cells
    assert not re.search(r"(src|href)=|@import|url\(http", text)  # it works offline


def test_names_in_a_record_are_escaped() -> None:
    page = render_tables("<b>", [("A", ("x",), [("<script>alert(1)</script>",)])])
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page and "<h1>&lt;b&gt;</h1>" in page


def test_damage_is_named_in_one_line(tiny: Path, tmp_path: Path) -> None:
    done("compile", tiny, "-o", tmp_path / "out")
    with (tmp_path / "out/model.onnx").open("ab") as file:
        file.write(b"x")
    result = weft_command("certificate", tmp_path / "out", "-o", tmp_path / "page.html")
    assert result.exit_code == 1 and 'class="fails"' in (tmp_path / "page.html").read_text()
    assert result.stderr.endswith("files have their checksums: model.onnx was modified after compilation\n")


def test_bad_input_is_refused(compiled_tiny: Path, tmp_path: Path) -> None:
    assert "name a file that ends in .html, not a.txt" in refused("certificate", compiled_tiny, "-o", "a.txt")
    assert "it has no weft.json or provenance.json" in refused("certificate", tmp_path)

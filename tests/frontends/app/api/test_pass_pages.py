"""The pages of docs/passes say what the docstrings say, and their examples do what the pages show.

After a change that is meant: ``weft passes --write-docs docs/passes``, and read the diff.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from weft.frontends.app.api import pass_pages
from weft.frontends.app.cli import cli
from weft.ir import parse
from weft.passes import all_passes, run_passes

PAGES = Path(__file__).resolve().parents[4] / "docs" / "passes"
LIBRARY = [name for name, found in all_passes().items() if found.__module__.startswith("weft.")]
BLOCK = re.compile(r"^```weft\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module", autouse=True)
def _rewritten() -> None:
    if os.environ.get("WEFT_GOLDEN") == "write":
        pass_pages.write_pages(PAGES)


@pytest.mark.parametrize("name", LIBRARY)
def test_page_equals_the_docstring(name: str) -> None:
    parts = all_passes()[name].documentation()
    assert parts.condition and parts.source and parts.pipeline and parts.graph, "a part of the docstring is missing"
    assert (PAGES / f"{name}.md").read_text(encoding="utf-8") == pass_pages.render_page(all_passes()[name])


@pytest.mark.parametrize("name", LIBRARY)
def test_example_on_the_page_is_its_result(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    before, after = BLOCK.findall(text)
    (pipeline,) = re.findall(r"^`(.*)` rewrites$", text, re.MULTILINE)
    assert pipeline.partition("{")[0] == name
    assert str(parse(before)) == before and before != after
    assert str(run_passes(parse(before), pipeline, verify=True)) == after == str(parse(after))


def test_index_lists_every_pass_by_purpose() -> None:
    text = (PAGES / "README.md").read_text(encoding="utf-8")
    assert text == pass_pages.render_index()
    assert re.findall(r"^\| \[([\w-]+)\]\(\1\.md\)", text, re.MULTILINE) == [
        name for names in pass_pages.group_by_purpose().values() for name in names
    ]
    known = all_passes()
    assert all(known[name].purpose != "Other" and {*known[name].see} <= {*LIBRARY} - {name} for name in LIBRARY)
    assert {path.stem for path in PAGES.glob("*.md")} == {*LIBRARY, "README"}


def test_the_command_lists_and_shows_passes_and_writes_pages(tmp_path: Path) -> None:
    run = CliRunner().invoke
    listed = run(cli, ["passes"]).stdout
    assert run(cli, ["opt", "--list"]).stdout == listed
    for name in LIBRARY:
        (line,) = re.findall(rf"^{name} .*$", listed, re.MULTILINE)
        assert all_passes()[name].effect in line
    shown = run(cli, ["passes", "pack-qkv"]).stdout
    parts = all_passes()["pack-qkv"].documentation()
    for text in (parts.summary, f"Condition: {parts.condition}", f"Source: {parts.source}", parts.graph.rstrip()):
        assert text in shown
    assert f"Trade-off: {all_passes()['pack-qkv'].tradeoff}" in shown
    assert re.search(r"^limit +int +4096$", run(cli, ["passes", "fold-constants"]).stdout, re.MULTILINE)
    result = run(cli, ["passes", "--write-docs", str(tmp_path / "pages")])
    assert result.exit_code == 0 and f"{len(LIBRARY) + 1} pages" in result.stderr
    assert {p.name for p in (tmp_path / "pages").iterdir()} == {p.name for p in PAGES.iterdir()}

"""weft viz --vs and weft opt --viz: what is compared, the pages that are written, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ....command import TINY, done, largest_file, refused, weft_command

OTHER = TINY.replace("kv_heads=2", "kv_heads=1").replace("layers=3", "layers=4")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two models, in which the command runs."""
    (tmp_path / "one.py").write_text(TINY)
    (tmp_path / "two.py").write_text(OTHER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def held(path: Path) -> dict[str, Any]:
    """The data in a page."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_comparison_counts_kept_new_and_changed_parts(models: Path) -> None:
    said = done("viz", "one.py", "--vs", "two.py")
    assert said.stderr == "weft: one-vs-two.html written\n"
    data = held(models / "one-vs-two.html")
    assert [side["key"] for side in data["root"]["inner"]] == ["before", "after"]
    counts = data["difference"]["counts"]
    # a layer more, which the last norm reads; in the others keys, values, their rotation and attention are narrower
    assert counts == {"kept": 3 * 11 + 2, "removed": 0, "new": 15, "changed": 3 * 4 + 1}
    assert list(data["kinds"]) == ["sign-kept", "sign-removed", "sign-new", "sign-changed"]


@pytest.mark.parametrize("ending", ["svg", "mmd", "dot", "txt"])
def test_comparison_notes_former_values_in_other_formats(ending: str, models: Path) -> None:
    done("viz", "one.py", "--vs", "two.py", "-o", f"a.{ending}")
    text = (models / f"a.{ending}").read_text()
    assert "was 2 KV heads" in text or "was 4 heads, 2 KV heads" in text
    done("viz", "one.py", "--vs", "one.py", "-o", f"b.{ending}")
    assert "was " not in (models / f"b.{ending}").read_text()


def test_comparison_refuses_missing_sources(models: Path) -> None:
    assert "'nothing'" in refused("viz", "one.py", "--vs", "nothing")
    assert "gone.weft" in refused("viz", "gone.weft", "--vs", "one.py")
    assert "did you mean .html" in refused("viz", "one.py", "--vs", "two.py", "-o", "a.htm")
    assert sorted(p.name for p in models.iterdir() if p.is_file()) == ["one.py", "two.py"]


def test_page_of_a_pipeline_shows_each_pass(models: Path) -> None:
    pipeline = "cse, mha-to-gqa{kv_heads=1}, kv-cache"
    said = done("opt", "one.py", "-p", pipeline, "--verify", "-o", "a.weft", "--viz", "steps.html")
    assert said.stderr.splitlines()[-1] == "weft: steps.html written"
    steps = held(models / "steps.html")["passes"]["steps"]
    assert [s["text"] for s in steps] == ["cse", "mha-to-gqa{kv_heads=1}", "kv-cache"]
    assert [s["effect"] for s in steps] == ["exact", "lossy", "conditional"]
    assert steps[0]["idle"] and not steps[1]["idle"]
    assert all(s["shown"] for s in steps) and steps[0]["difference"] == 0 and steps[2]["difference"] < 1e-12
    assert steps[1]["arguments"]["kv_heads"] == "1" and steps[1]["arguments"]["method"] == '"mean"'
    operations = [s["operations"] for s in steps]
    assert operations[0][1] == operations[1][0] and operations[1][1] == operations[2][0]


def test_page_of_a_piped_graph(models: Path) -> None:
    text = done("opt", "one.py").stdout
    done("opt", "-", "-p", "pack-qkv", "-o", "a.weft", "--viz", "steps.html", input=text)
    assert len(held(models / "steps.html")["passes"]["steps"]) == 1


def test_pages_without_passes_or_a_writable_path_are_refused(models: Path) -> None:
    assert "ends in .html" in refused("opt", "one.py", "-p", "cse", "-o", "a.weft", "--viz", "a.svg")
    assert "no passes to draw" in refused("opt", "one.py", "-o", "a.weft", "--viz", "a.html")
    (models / "folder.html").mkdir()
    assert "it is a folder" in refused("opt", "one.py", "-p", "pack-qkv", "-o", "a.weft", "--viz", "folder.html")
    assert "no such file" in refused("opt", "one.py", "-p", "pack-qkv", "-o", "a.weft", "--viz", "nowhere/a.html")
    assert "unknown pass" in refused("opt", "one.py", "-p", "nothing", "-o", "a.weft", "--viz", "a.html")
    assert sorted(p.name for p in models.iterdir() if p.is_file()) == ["one.py", "two.py"]


@pytest.mark.parametrize("command", ["viz one.py --vs two.py -o a.html", "opt one.py -p cse -o a.weft --viz a.html"])
def test_full_disk_leaves_the_previous_page(command: str, models: Path) -> None:
    (models / "a.html").write_text("older")
    with largest_file(10_000):
        result = weft_command(*command.split())
    assert result.exit_code == 2 and result.stderr.splitlines()[-1].startswith("weft: error: cannot write to ")
    assert (models / "a.html").read_text() == "older"
    assert {p.name for p in models.iterdir()} <= {"one.py", "two.py", "a.html", "__pycache__"}

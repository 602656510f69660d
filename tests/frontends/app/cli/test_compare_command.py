"""`weft compare`: its table, its chart, and impossible options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ...command import TINY, done, refused

SHORT = ("--batch", "4", "--context", "16", "--device", "cpu", "--seeds", "2", "--tokenizer", "bytes")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two architectures and a text."""
    (tmp_path / "heads.py").write_text(TINY)
    (tmp_path / "single.py").write_text(TINY.replace("kv_heads=2", "kv_heads=1"))
    (tmp_path / "notes.txt").write_text("it was a bright cold day in april " * 60)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_compare_prints_a_row_per_variant_and_draws_the_curves(home: Path) -> None:
    common = ("compare", "heads.py", "single.py", "--text", "notes.txt", *SHORT, "--steps", "20")
    (home / "curves.svg").write_text("an older one")
    lines = done(*common, "--plot", "curves.svg").stdout.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["heads.py", "single.py"]
    assert "±" in lines[-4]
    picture = (home / "curves.svg").read_text()
    assert all(word in picture for word in ("heads.py", "single.py", "tokens", "FLOPs", "seconds"))
    first, second = json.loads(done(*common, "--json", "--validate-every", "8").stdout)["variants"]
    tokens = first["runs"][0][0]["tokens"] // 8
    assert [point["tokens"] // tokens for point in first["runs"][0]] == [8, 16, 20]
    assert first["cache_bytes"] == 2 * second["cache_bytes"] and len(first["losses"]) == 2


def test_impossible_comparisons_are_refused(home: Path) -> None:
    assert "needs a text to train on" in refused("compare", "heads.py", "single.py")
    common = ("--text", "notes.txt", *SHORT)
    assert "needs two architectures or more" in refused("compare", "heads.py", *common)
    assert "not in equal time" in refused("compare", "heads.py", "single.py", *common, "--minutes", "1")
    assert "--theme needs --plot" in refused("compare", "heads.py", "single.py", *common, "--theme", "dark")
    assert "cannot write a chart to none/a.svg" in refused(
        "compare", "heads.py", "single.py", *common, "--plot", "none/a.svg"
    )
    assert "cannot write a chart as .gif" in refused("compare", "heads.py", "single.py", *common, "--plot", "a.gif")

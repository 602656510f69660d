"""`weft train`: its lines, its result, and impossible options."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ...command import TINY, done, refused

SHORT = ("--steps", "4", "--batch", "2", "--context", "16", "--device", "cpu")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an architecture and a text, which is the working directory."""
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "notes.txt").write_text("it was a bright cold day in april " * 60)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_train_prints_the_losses_and_writes_a_source(home: Path) -> None:
    lines = done("train", "tiny.py", "--text", "notes.txt", *SHORT, "--every", "2", "-o", "run").stdout.splitlines()
    assert re.fullmatch(
        r"training +2  loss \d\.\d{4}  validation .*  rate .*  [\d,]+ tokens/s  \d+:\d\d left", lines[1]
    )
    assert re.fullmatch(r"loss on held-out text, in nats per token: .* before, .* best, .* last", lines[-2])
    assert lines[-1] == "run written; try `weft run run`"
    assert "trained" in (home / "run" / "best" / "provenance.json").read_text()
    for command in (("inspect", "run"), ("viz", "run", "-o", "run.svg"), ("opt", "run", "-p", "dce", "-o", "opt/")):
        done(*command)
    out = json.loads(done("train", "tiny.py", "--resume", "run", "--steps", "6", "--json").stdout)
    assert out["steps"] == 6 and out["folder"] == "run" and out["best"] <= out["before"]


def test_impossible_options_are_refused(home: Path) -> None:
    assert "training needs SOURCE, --text TEXT and -o FOLDER, or --resume FOLDER" in refused("train", "tiny.py")
    done("train", "tiny.py", "--text", "notes.txt", *SHORT, "-o", "run")
    assert "names code, " in refused("train", "--resume", "run")
    assert "give --resume only SOURCE" in refused("train", "tiny.py", "--resume", "run", "--batch", "3")
    assert "give --resume only SOURCE" in refused("train", "tiny.py", "--resume", "run", "--field", "body")
    assert "run exists" in refused("train", "tiny.py", "--text", "notes.txt", *SHORT, "-o", "run")
    assert "none.txt cannot be read" in refused("train", "tiny.py", "--text", "none.txt", "-o", "other")
    assert "rate is -1.0" in refused("train", "tiny.py", "--text", "notes.txt", "--rate", "-1", "-o", "other")
    assert not (home / "other").exists()

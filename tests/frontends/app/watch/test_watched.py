"""A file that is being edited: its picture follows, errors leave the last one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from weft.frontends.app.watch.watched import Watched
from weft.ir.errors import WeftError

CODE = """from weft import Attention, Block, Decoder, GatedMLP, RMSNorm
from sizes import LAYERS

model = Decoder(vocab=37, dim=16, layers=LAYERS, block=Block(Attention(heads=4), GatedMLP(24), RMSNorm()))
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "sizes", raising=False)
    (tmp_path / "sizes.py").write_text("LAYERS = 2\n")
    path = tmp_path / "model.py"
    path.write_text(CODE)
    return path


def save(path: Path, text: str, watched: Watched) -> None:
    before = path.stat().st_mtime_ns
    path.write_text(text)
    os.utime(path, ns=(before + 10**9, before + 10**9))
    assert watched.poll()


def test_saved_files_are_drawn_again(file: Path) -> None:
    watched = Watched(str(file))
    first = watched.data
    assert (watched.version, first["error"], watched.poll()) == (1, None, False)
    assert first["totals"].split(" · ")[1] == "2 layers"
    save(file, CODE.replace("heads=4", "heads=4, kv_heads=2"), watched)
    assert watched.wait(1, 0)["version"] == 2
    assert watched.data["facts"]["cache"] < first["facts"]["cache"]
    save(file.with_name("sizes.py"), "LAYERS = 3\n", watched)  # a module that it imports
    assert watched.data["totals"].split(" · ")[1] == "3 layers"


def test_errors_have_their_line_and_leave_the_last_picture(file: Path) -> None:
    watched = Watched(str(file))
    root = watched.data["root"]
    save(file, CODE.replace("heads=4", "heads=3"), watched)
    assert watched.data["root"] == root
    assert watched.data["error"]["line"] == 4 and "model.py:4" in watched.data["error"]["text"]
    save(file, CODE, watched)
    assert watched.data["error"] is None


def test_numbers_and_passes(file: Path) -> None:
    watched = Watched(str(file))
    (heads,) = [i for i, n in enumerate(watched.data["numbers"]) if n["name"] == "heads"]
    watched.edit({heads: 2}, ["fuse-glu", "fold-norm-scale"])
    numbers, passes = watched.data["numbers"], {p["name"]: p for p in watched.data["passes"]}
    assert (numbers[heads]["value"], numbers[heads]["now"]) == (4, 2)
    assert passes["fold-norm-scale"]["rewrites"] > 0 and passes["fold-norm-scale"]["difference"] < 1e-12
    assert passes["fuse-glu"]["idle"] and "rewrites" not in passes["cse"]
    assert dict(map(tuple, watched.list_launches()))["norm_qkv"] == 2
    compared = {point["value"]: point for point in watched.compare(heads)}
    assert compared[3]["error"].startswith(str(file)) and compared[4]["parameters"] == compared[2]["parameters"]


def test_only_architecture_files_are_followed() -> None:
    with pytest.raises(WeftError, match=r"--watch follows an architecture file, such as model\.py, not gpt2"):
        Watched("gpt2")

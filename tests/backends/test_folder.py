"""Output folders appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from weft.backends.folder import whole_folder
from weft.ir import WeftError


def older(out: Path) -> Path:
    out.mkdir()
    (out / "weft.json").write_text("old")
    return out


def siblings(out: Path) -> list[str]:
    return sorted(p.name for p in out.parent.iterdir())


def fail_inside(out: Path, failure: BaseException) -> None:
    with whole_folder(out) as folder:
        (folder / "half").write_text("new")
        raise failure


def test_a_new_folder_appears(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with whole_folder(out) as folder:
        (folder / "weft.json").write_text("new")
        assert not out.exists()
    assert (out / "weft.json").read_text() == "new"
    assert siblings(out) == ["out"]
    umask = os.umask(0)
    os.umask(umask)
    assert out.stat().st_mode & 0o777 == 0o777 & ~umask


def test_an_older_folder_is_replaced(tmp_path: Path) -> None:
    out = older(tmp_path / "out")
    (out / "left_over").write_text("x")
    with whole_folder(out) as folder:
        (folder / "weft.json").write_text("new")
    assert [p.name for p in out.iterdir()] == ["weft.json"]
    assert siblings(out) == ["out"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), WeftError("bad weight"), RuntimeError("bug")])
def test_an_older_folder_survives_a_failure(tmp_path: Path, failure: BaseException) -> None:
    out = older(tmp_path / "out")
    with pytest.raises(type(failure)):
        fail_inside(out, failure)
    assert (out / "weft.json").read_text() == "old"
    assert siblings(out) == ["out"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EACCES, "may write to"),
        (errno.EFBIG, "largest size"),
        (errno.EIO, "error"),
    ],
)
def test_failures_of_the_file_system_are_told_in_a_sentence(tmp_path: Path, number: int, words: str) -> None:
    out = older(tmp_path / "out")
    with pytest.raises(WeftError, match=words) as told:
        fail_inside(out, OSError(number, os.strerror(number)))
    assert str(out) in str(told.value)
    assert (out / "weft.json").read_text() == "old"
    assert siblings(out) == ["out"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(WeftError, match="in the way"), whole_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out").read_text() == "precious"


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(WeftError, match="did not write"), whole_folder(tmp_path):
        pass
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(WeftError, match="out: a file is in the way"), whole_folder(tmp_path / "file" / "out"):
        pass

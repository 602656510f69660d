"""Output folders and files appear whole or not at all, under any name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from weft.ir import WeftError
from weft.ir.storage import MANIFEST, disk, replace_file, replace_folder, write_manifest

from .written import RECORD, fail_inside, siblings, tree, write


def test_a_new_folder_appears(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with replace_folder(out) as folder:
        (folder / "model.bin").write_text("new")
        write_manifest(folder, MANIFEST, RECORD)
        assert not out.exists()
    assert (out / "model.bin").read_text() == "new"
    assert siblings(out) == ["out"]
    assert out.stat().st_mode & 0o777 == 0o777 & ~disk.read_umask()


def test_an_older_folder_is_replaced(out: Path, way: str) -> None:
    out.chmod(0o750)
    write(out)
    assert (out / "model.bin").read_text() == "new"
    assert siblings(out) == ["out"]
    assert out.stat().st_mode & 0o777 == 0o750


def test_an_empty_folder_is_replaced(tmp_path: Path, way: str) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    assert siblings(tmp_path / "out") == ["out"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), WeftError("bad weight"), RuntimeError("bug")])
def test_an_older_folder_survives_a_failure(out: Path, failure: BaseException) -> None:
    before = tree(out)
    with pytest.raises(type(failure)):
        fail_inside(out, failure)
    assert tree(out) == before
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
def test_file_system_errors_are_one_sentence(out: Path, number: int, words: str) -> None:
    before = tree(out)
    with pytest.raises(WeftError, match=words) as told:
        fail_inside(out, OSError(number, os.strerror(number)))
    assert str(out) in str(told.value)
    assert tree(out) == before
    assert siblings(out) == ["out"]


def test_a_link_stays_a_link(tmp_path: Path, out: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for target in (out, tmp_path / "elsewhere" / "new"):
        link = tmp_path / "link"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        write(link)
        assert link.is_symlink() and (target / "model.bin").read_text() == "new"
    (tmp_path / "file").write_text("old")
    (tmp_path / "to_file").symlink_to(tmp_path / "file")
    with replace_file(tmp_path / "to_file") as partial:
        partial.write_text("new")
    assert (tmp_path / "to_file").is_symlink() and (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("length", [240, 255])
def test_long_names_work(tmp_path: Path, length: int, way: str) -> None:
    for _ in range(2):
        write(tmp_path / ("o" * length))
        with replace_file(tmp_path / ("f" * length)) as partial:
            partial.write_text("new")
    assert siblings(tmp_path / "x") == ["f" * length, "o" * length]


def test_names_that_are_too_long_or_impossible_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("o" * 256, "a\0b", "loop/out"):
        with pytest.raises(WeftError, match="cannot write to"):
            write(tmp_path / name)
        with pytest.raises(WeftError, match="cannot write to"), replace_file(tmp_path / name):
            pass


def test_devices_are_written_into() -> None:
    read, end = os.pipe()
    with replace_file(Path(f"/dev/fd/{end}")) as partial:
        partial.write_text("through the pipe")
    os.close(end)
    with os.fdopen(read) as stream:
        assert stream.read() == "through the pipe"
    with replace_file(Path(os.devnull)) as partial:
        partial.write_text("nothing")
    assert not Path(os.devnull).is_file()

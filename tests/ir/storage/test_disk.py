"""System calls: swaps, flushes, the umask, explanations of errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from weft.ir.storage import disk


def test_swapped_paths_exchange_their_contents(tmp_path: Path) -> None:
    """Check that paths are exchanged, or stay as they are on a file system that cannot exchange paths."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("b")
    swapped = disk.swap_paths(tmp_path / "a", tmp_path / "b")
    file, folder = ("a", "b") if swapped else ("b", "a")
    assert (tmp_path / file).read_text() == "b" and (tmp_path / folder).is_dir()
    if swapped:
        with pytest.raises(FileNotFoundError):
            disk.swap_paths(tmp_path / "a", tmp_path / "c")


def test_trees_are_flushed_from_the_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.fstat(fd).st_ino))
    disk.flush_tree(tmp_path)
    order = [tmp_path / "inner" / "a", tmp_path / "inner", tmp_path / "b", tmp_path]
    assert flushed == [path.stat().st_ino for path in order]


def test_flush_ignores_file_systems_that_cannot_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = errno.EINVAL

    def fsync(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    disk.flush(tmp_path)
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        disk.flush(tmp_path)


def test_umask_is_read_and_unchanged() -> None:
    before = os.umask(0o027)
    try:
        assert disk.read_umask() == disk.read_umask() == 0o027
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full; free some space or name a folder on another disk"),
        (errno.EACCES, "permission denied; name a folder you may write to"),
        (errno.ENOTDIR, "a file is in the way"),
        (errno.EFBIG, "the file would exceed the largest size allowed here (see ulimit -f)"),
        (errno.EIO, "input/output error"),
    ],
)
def test_os_errors_are_explained(number: int, words: str) -> None:
    assert disk.explain_os_error(OSError(number, os.strerror(number))) == words

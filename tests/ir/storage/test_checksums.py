"""Checksums notice damage, and stamps sources that change while they are read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.ir import WeftError
from weft.ir.storage import MANIFEST, PROVENANCE, check_contents, check_format, check_unchanged, take_stamps


def test_every_flipped_bit_is_noticed(out: Path) -> None:
    assert check_contents(out) == 2
    for path in (p for p in out.rglob("*") if p.is_file()):
        whole = path.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 40)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            if path.name == MANIFEST and _same(path, whole):
                continue  # white space
            with pytest.raises(WeftError):
                check_contents(out)
        path.write_bytes(whole)
    assert check_contents(out) == 2


def _same(path: Path, whole: bytes) -> bool:
    try:
        return bool(json.loads(path.read_bytes()) == json.loads(whole))
    except ValueError:
        return False


def test_missing_files_and_manifests_are_named(out: Path) -> None:
    (out / "model.bin").unlink()
    with pytest.raises(WeftError, match=r"model\.bin is missing"):
        check_contents(out)
    (out / MANIFEST).write_text("{}")
    with pytest.raises(WeftError, match="cannot be checked"):
        check_contents(out)


@pytest.mark.parametrize("version", [2, 10**9, "1", True, -1, None])
def test_newer_formats_are_refused(version: object) -> None:
    with pytest.raises(
        WeftError, match="upgrade weft" if type(version) is int and version > 0 else "non-negative integer"
    ):
        check_format(Path(PROVENANCE), {"weft": "9.0", "format": version})


def test_a_source_that_changes_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    changes: list[Callable[[], object]] = [
        lambda: path.write_bytes(b"other"),
        lambda: os.utime(path, ns=(0, 1)),
        path.unlink,
        lambda: (tmp_path / "new").rename(path),
    ]
    for change in changes:
        path.write_bytes(b"bytes")
        os.utime(path, ns=(0, 0))
        before = take_stamps([path, tmp_path / "missing"])
        (tmp_path / "new").write_bytes(b"bytes")
        os.utime(tmp_path / "new", ns=(0, 0))
        check_unchanged(before)
        change()
        with pytest.raises(WeftError, match=r"model\.gguf has changed while it was read"):
            check_unchanged(before)

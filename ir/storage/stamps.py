"""Stamps of files, by which a source file that changes while it is read is detected."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import WeftError

# Of a file: size and time change when it is written to, device and inode when it is replaced.
Stamp = tuple[int, int, int, int]


def take_stamps(paths: Iterable[Path]) -> dict[Path, Stamp]:
    """Map each of `paths` that is a file to its stamp; call this before the files are read."""
    return {path: _take_stamp(path) for path in paths if path.is_file()}


def check_unchanged(before: Mapping[Path, Stamp]) -> None:
    """Check that each file still has its stamp in `before`.

    Raises:
        WeftError: naming the first file that was written to, replaced or removed since then.
    """
    for path, then in before.items():
        try:
            same = _take_stamp(path) == then
        except OSError:
            same = False
        if not same:
            raise WeftError(f"{path} has changed while it was read: run the command again when no program writes to it")


def _take_stamp(path: Path) -> Stamp:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino

"""Stamps of files, which reveal a source that changes while it is read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import WeftError


class Stamp(NamedTuple):
    """Size and time, which change when a file is written to, and device and inode, which change when it is replaced."""

    size: int
    mtime_ns: int
    device: int
    inode: int


def take_stamps(paths: Iterable[Path]) -> dict[Path, Stamp]:
    """Return the stamps of the files among `paths`; call it before the first byte is read."""
    return {path: _take_stamp(path) for path in paths if path.is_file()}


def check_unchanged(before: Mapping[Path, Stamp]) -> None:
    """Check that the files still have the stamps in `before`.

    Raises:
        WeftError: naming the first file that was written to, replaced or removed since.
    """
    for path, then in before.items():
        try:
            same = _take_stamp(path) == then
        except OSError:
            same = False
        if not same:
            raise WeftError(f"{path} has changed while it was read: run the command again when it is complete")


def _take_stamp(path: Path) -> Stamp:
    status = os.stat(path)
    return Stamp(status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)

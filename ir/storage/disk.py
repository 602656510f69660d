"""System calls: flush files to the disk, swap two paths, explain errors of the system."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

_AT_FDCWD = -100  # names are relative to the working folder, as everywhere
_RENAME_EXCHANGE = 2  # linux/fs.h; macOS calls the same bit RENAME_SWAP
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def swap_paths(a: Path, b: Path) -> bool:
    """Swap the files or folders at `a` and `b` atomically (renameat2(2), renamex_np(2)) and return True.

    Return False, with nothing changed, if the system or file system has no such call. OSError if it fails otherwise.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(a), os.fsencode(b)
    if sys.platform == "linux" and hasattr(libc, "renameat2"):
        failed = libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    elif hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(*names, _RENAME_EXCHANGE)
    else:
        return False
    if failed and ctypes.get_errno() not in _UNSUPPORTED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(b))
    return not failed


def flush(path: Path) -> None:
    """Flush the file at `path`, or the directory entries of a folder, to the disk (fsync), where that is supported."""
    # fsync accepts read-only descriptors, the only kind that folders have.
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in _UNSUPPORTED:  # some network file systems cannot flush folders
            raise
    finally:
        os.close(fd)


def flush_tree(folder: Path) -> None:
    """Flush `folder` and everything in it to the disk: files before their folder, inner folders first."""
    for at, _, files in os.walk(folder, topdown=False):
        for name in files:
            flush(Path(at, name))
        flush(Path(at))


def read_umask() -> int:
    """Return the umask of this process: the permission bits that new files do not get."""
    # Setting the mask is the only portable way to read it.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def explain_os_error(e: OSError) -> str:
    """Return a phrase that explains why writing failed with `e`, with the remedy if it is known."""
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free some space or name a folder on another disk"
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{(e.strerror or 'not permitted').lower()}; name a folder you may write to"
    if e.errno in (errno.EEXIST, errno.ENOTDIR, errno.ENOTEMPTY):
        return "a file is in the way"
    if e.errno == errno.EFBIG:
        return "the file would exceed the largest size allowed here (see ulimit -f)"
    return (e.strerror or str(e)).lower()

"""Temporary files and folders, with locks that distinguish those of running processes from leftovers of dead ones.

A process holds a lock (flock(2)) on each of its temporary files; the kernel releases it when the process ends, however
that happens. A process that writes next to an unlocked temporary file removes it, and logs that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import WeftError
from ..readable import format_bytes
from .contents import MANIFESTS, remove_listed
from .disk import explain_os_error

PARTIAL = ".weft-partial-"  # next to the result; short, so that it fits before any name of a result
ASIDE = ".weft-old-"  # prefix of the older result where two names cannot be swapped in one step
SCRATCH = "weft-scratch-"  # in the system's temporary folder
PATIENCE = 60  # seconds that a replacement waits for another one of the same folder
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}

log = logging.getLogger("weft")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder in the system's temporary folder, removed after the block; WeftError if that fails."""
    parent = Path(tempfile.gettempdir())
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(create_temporary(parent, SCRATCH))
        except OSError as e:
            raise WeftError(f"cannot write to {parent}: {explain_os_error(e)}") from e
        yield folder


@contextlib.contextmanager
def create_temporary(parent: Path, prefix: str = PARTIAL, folder: bool = True) -> Iterator[Path]:
    """Yield a new temporary folder (or file, if not `folder`) in `parent`, locked in the block and then removed.

    First remove leftovers of dead processes with the same `prefix`.
    """
    remove_leftovers(parent, prefix)
    path, lock = _create_locked(parent, prefix, folder)
    try:
        yield path
    finally:
        # Still locked, so that no other process sweeps it meanwhile.
        _remove(path)
        if lock is not None:
            os.close(lock)


def _create_locked(parent: Path, prefix: str, folder: bool) -> tuple[Path, int | None]:
    """Create a temporary file or folder; return its path and the result of `_lock`. Begin again if another process
    locked or removed it meanwhile."""
    while True:
        if folder:
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        else:
            handle, name = tempfile.mkstemp(prefix=prefix, dir=parent)
            os.close(handle)
            path = Path(name)
        try:
            return path, _lock(path)
        except (BlockingIOError, FileNotFoundError):
            continue


def _lock(path: Path) -> int | None:
    """Lock `path` and return the file descriptor, whose closing unlocks it; None if the file system has no locks.

    Raises:
        BlockingIOError: if another process holds the lock.
        FileNotFoundError: if `path` was removed meanwhile.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # opening a pipe must not block
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and flock another process may have replaced the file: then this lock protects nothing.
        if os.fstat(fd).st_ino != os.lstat(path).st_ino:
            raise FileNotFoundError(errno.ENOENT, "replaced", str(path))
    except OSError as e:
        os.close(fd)
        if e.errno in _NO_LOCKS:
            return None
        raise
    return fd


@contextlib.contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Return a context with the lock of the folder at `path`: no other process of weft replaces or removes it
    meanwhile. Without effect on a file system that has no locks.

    Raises:
        FileNotFoundError: if the folder does not exist.
        WeftError: if another process holds the lock for longer than `PATIENCE` seconds.
    """
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            lock = _lock(path)
            break
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise WeftError(f"another process has been writing to {path} for a minute; try again later") from None
            time.sleep(0.01)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def remove_leftovers(parent: Path, prefix: str = PARTIAL) -> None:
    """Remove the unlocked temporary files and folders of this user in `parent` that begin with `prefix`; log each.

    In a folder with a manifest, an older result whose removal was interrupted, only the listed files are removed.
    """
    for path in sorted(parent.glob(f"{prefix}*")):
        lock = None
        try:
            status = path.lstat()
            # The system's temporary folder is shared: other users may leave links or files of such names there.
            if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid():
                continue
            lock = _lock(path)
            if lock is None:  # its process may still run
                continue
            files = (Path(at, name) for at, _, names in os.walk(path) for name in names)
            bytes_ = sum(file.lstat().st_size for file in files) if path.is_dir() else status.st_size
            _remove(path)
        except OSError:  # locked, or removed by another process meanwhile
            continue
        finally:
            if lock is not None:
                os.close(lock)
        if path.exists():
            log.warning("%s holds files that weft did not write; move them elsewhere and remove it", path)
        else:
            log.warning("removed %s, %s that an interrupted run had left", path, format_bytes(bytes_))


def _remove(path: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)
    elif any((path / name).is_file() for name in MANIFESTS):
        remove_listed(path)
    else:
        shutil.rmtree(path, ignore_errors=True)

"""Output folders and files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from weft.ir.errors import WeftError


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its place when the block ends well.

    If the block fails or is interrupted the temporary folder is removed, and an older `out` stays as it was.

    Raises:
        WeftError: if `out` cannot be written: a file is in the way, no permission, or the disk is full.
    """
    out = out.absolute()
    check_free(out)
    partial: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
        yield partial
        partial.chmod(0o777 & ~umask())
        _take_place(partial, out)
    except OSError as e:
        raise WeftError(f"cannot write to {out}: {reason(e)}") from e
    finally:
        if partial is not None and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)


def check_free(out: Path) -> None:
    """Raise WeftError if `whole_folder` would not take the place of `out`; to be asked before long work for it."""
    out = out.absolute()
    try:
        if out.exists() and not out.is_dir():
            raise WeftError(f"cannot write to {out}: a file with that name is in the way")
        ours = not out.is_dir() or is_ours(out) or not any(out.iterdir())
    except OSError as e:
        raise WeftError(f"cannot write to {out}: {reason(e)}") from e
    if not ours:
        raise WeftError(f"will not replace {out}: it holds files that weft did not write; name an empty or new folder")


@contextlib.contextmanager
def whole_file(out: Path) -> Iterator[Path]:
    """A temporary file beside `out` that takes its place when the block ends well; else an older `out` stays.

    Raises:
        WeftError: if `out` cannot be written: it is a folder, no permission, or the disk is full.
    """
    if out.is_dir():
        raise WeftError(f"cannot write to {out}: it is a folder")
    out = out.resolve()  # a link stays one
    partial: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{out.name}.partial-", dir=out.parent)
        os.close(handle)
        partial = Path(name)
        yield partial
        partial.chmod(0o666 & ~umask())
        partial.replace(out)
    except OSError as e:
        raise WeftError(f"cannot write to {out}: {reason(e)}") from e
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def is_ours(folder: Path) -> bool:
    """Whether weft wrote `folder` (the record in it tells): a compiled model, or one to be compiled."""
    return any((folder / name).is_file() for name in ("weft.json", "provenance.json"))


def _take_place(new: Path, out: Path) -> None:
    """Rename `new` to `out`; an older `out` is put aside first and comes back if the renaming fails."""
    if not out.exists():
        new.rename(out)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
    out.rename(aside / "old")
    try:
        new.rename(out)
    except BaseException:
        (aside / "old").rename(out)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def umask() -> int:
    """What new files of this process are not permitted."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def reason(e: OSError) -> str:
    """Why the system refused to write, and what would help, in a few words."""
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free some space or name a folder on another disk"
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{(e.strerror or 'not permitted').lower()}; name a folder you may write to"
    if e.errno in (errno.EEXIST, errno.ENOTDIR):
        return "a file is in the way"
    if e.errno == errno.EFBIG:
        return "the file would exceed the largest size allowed here (see ulimit -f)"
    return (e.strerror or str(e)).lower()

"""Output folders and files: they appear complete or not at all, and folders replace only output of weft."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import WeftError
from .contents import MANIFESTS, find_altered, find_unlisted, remove_listed
from .disk import explain_os_error, flush, flush_tree, read_umask, swap_paths
from .partials import ASIDE, create_temporary, lock_folder, log, scratch_folder

SHOWN = 3  # foreign names in an error


@contextlib.contextmanager
def replace_folder(out: Path, sources: Iterable[Path] = ()) -> Iterator[Path]:
    """Yield a temporary folder that then replaces `out`. The block must write all files into it, the manifest last.

    At every moment `out` is the complete older folder or the complete new one, also for other processes and after a
    power failure: all files are flushed to the disk, then the two paths are swapped in one step. (Where the system
    cannot swap, `out` is missing for a moment.) If the block fails, the temporary folder is removed, and an older `out`
    stays. If `out` is a link, its target is replaced. Missing parents are created. None of `sources`, files read
    meanwhile, may be `out` or in it.

    Raises:
        WeftError: as `check_replaceable`, or if `out` cannot be written: no permission, or the disk is full.
    """
    out, sources = _resolve_links(out), tuple(sources)
    check_replaceable(out, sources, contents=True)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _restore_backup(out)
        with create_temporary(out.parent) as partial:
            yield partial
            assert any((partial / name).is_file() for name in MANIFESTS), "a folder without a manifest is not ours"
            # mkdtemp makes folders that only their owner can open.
            partial.chmod(stat.S_IMODE(out.stat().st_mode) if out.is_dir() else 0o777 & ~read_umask())
            # Before the names change: after a power failure the new name must not refer to files without their bytes.
            flush_tree(partial)
            _install(partial, out, sources)
    except OSError as e:
        raise WeftError(f"cannot write to {out}: {explain_os_error(e)}") from e


@contextlib.contextmanager
def replace_file(out: Path, sources: Iterable[Path] = ()) -> Iterator[Path]:
    """Yield a temporary file, which replaces `out` when the block succeeds; else an older `out` stays.

    It is next to `out` (or the target of a link); if `out` is a device or a pipe it is elsewhere, and is copied into
    `out`. None of `sources`, files that are read meanwhile, may be `out`.

    Raises:
        WeftError: if `out` cannot be written: it is a folder or a source, no permission, or the disk is full.
    """
    try:
        if out.is_dir():
            raise WeftError(f"cannot write to {out}: it is a folder; name a file")
        out = _resolve_links(out) if out.is_file() or not out.exists() else out.absolute()
        _check_sources(out, sources)
        plain = out.is_file() or not out.exists()
        with contextlib.ExitStack() as stack:
            if plain:
                partial = stack.enter_context(create_temporary(out.parent, folder=False))
            else:
                partial = stack.enter_context(scratch_folder()) / "output"
            yield partial
            if not plain:
                with partial.open("rb") as source_file, out.open("wb") as device:
                    shutil.copyfileobj(source_file, device)
                return
            # mkstemp makes files that only their owner can read.
            partial.chmod(stat.S_IMODE(out.stat().st_mode) if out.exists() else 0o666 & ~read_umask())
            flush(partial)
            partial.replace(out)
            flush(out.parent)
    except OSError as e:
        raise WeftError(f"cannot write to {out}: {explain_os_error(e)}") from e


def check_replaceable(out: Path, sources: Iterable[Path] = (), *, contents: bool = False) -> None:
    """Check that `replace_folder` may replace `out`; call this before long work for it.

    `out` may be missing, an empty folder, or a folder whose manifest lists every file in it. With `contents` the files
    must also match the checksums in the manifest, which reads them all.

    Raises:
        WeftError: naming files that would be lost; if `out` is a file; if one of `sources` is `out` or inside it.
    """
    out = _resolve_links(out)
    try:
        if out.exists() and not out.is_dir():
            raise WeftError(f"cannot write to {out}: a file with that name is in the way; name a folder")
        _check_sources(out, sources)
        foreign, edited = _find_losses(out, contents) if out.is_dir() else ([], [])
    except OSError as e:
        raise WeftError(f"cannot write to {out}: {explain_os_error(e)}") from e
    if foreign:
        raise WeftError(
            f"will not replace {out}: it holds files that weft did not write ({_format_names(foreign)}); "
            "name an empty or new folder"
        )
    if edited:
        raise WeftError(
            f"will not replace {out}: files in it have changed since weft wrote them ({_format_names(edited)}); "
            "name another folder, or remove this one"
        )


def _find_losses(out: Path, contents: bool) -> tuple[list[str], list[str]]:
    """Return the names of unlisted files in `out`, and of changed listed files ([] if not `contents`, or if there are
    unlisted files). Begin again if another process replaces `out` meanwhile."""
    while True:
        before = os.stat(out)
        try:
            foreign = find_unlisted(out)
            edited = find_altered(out) if contents and not foreign else []
        except FileNotFoundError:
            if not out.exists():
                return [], []
            continue
        after = os.stat(out)
        if (before.st_ino, before.st_ctime_ns) == (after.st_ino, after.st_ctime_ns):  # a rename sets the time
            return foreign, edited


def _resolve_links(out: Path) -> Path:
    try:
        return Path(os.path.realpath(out))
    except (OSError, ValueError) as e:
        raise WeftError(f"cannot write to {out}: {e}") from e


def _check_sources(out: Path, sources: Iterable[Path]) -> None:
    for source in sources:
        real = Path(os.path.realpath(source))
        if real == out or out in real.parents or (real.exists() and out.exists() and real.samefile(out)):
            relation = "is" if real == out or not out.is_dir() else "holds"
            raise WeftError(f"will not write to {out}: it {relation} the source {source}; name another place")


def _install(new: Path, out: Path, sources: Iterable[Path]) -> None:
    """Rename the folder `new` to `out`; an existing `out` must pass `check_replaceable` and is replaced."""
    while True:
        try:
            with lock_folder(out):
                check_replaceable(out, sources)
                _swap_folders(new, out)
                return
        except FileNotFoundError:  # there is no folder to replace yet
            pass
        try:
            new.rename(out)  # succeeds if `out` is missing or an empty folder
            flush(out.parent)
            return
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise  # otherwise another process was faster


def _swap_folders(new: Path, out: Path) -> None:
    """Swap the folders `new` and `out` and remove the older one. If it has unlisted files, added at the last moment,
    swap back and raise WeftError."""
    old = new
    if not swap_paths(new, out):
        # no system call swaps: between the two renames `out` is missing; `_restore_backup` repairs a kill between them
        old = _backup_path(out)
        out.rename(old)
        new.rename(out)
    flush(out.parent)
    if foreign := find_unlisted(old):
        if old == new:
            swap_paths(new, out)
        else:
            out.rename(new)
            old.rename(out)
        raise WeftError(
            f"will not replace {out}: it was written to meanwhile ({_format_names(foreign)}); name a new folder"
        )
    remove_listed(old)


def _backup_path(out: Path) -> Path:
    return out.parent / f"{ASIDE}{out.name[:200]}"


def _restore_backup(out: Path) -> None:
    """Rename the backup of `out` that a killed process left back to `out`; remove the backup if `out` exists."""
    aside = _backup_path(out)
    if not aside.is_dir():
        return
    with lock_folder(aside):
        if not out.exists():
            aside.rename(out)
            log.warning("restored %s, which an interrupted run had put aside", out)
        else:
            remove_listed(aside)
            log.warning("removed %s, which an interrupted run had left", aside)


def _format_names(names: list[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest

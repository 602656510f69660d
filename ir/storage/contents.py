"""Manifests: they list the SHA-256 of every file in a folder that weft wrote, and their own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import WeftError
from .documents import read_json

MANIFEST = "weft.json"  # of compiled models
PROVENANCE = "provenance.json"  # of model folders and exported checkpoints
MANIFESTS = (MANIFEST, PROVENANCE)
FORMAT = 1  # of manifests; raised when older versions of weft would misread a newer one
SEALED = ("format", "files", "checksum")  # what `seal` adds to a record
_PIECE = 1 << 22


def seal(folder: Path, name: str, record: Mapping[str, Any]) -> None:
    """Write `record` as the manifest `name` of `folder`, with the checksums of all files in it and of the manifest.

    The manifest's own (`checksum`) is the SHA-256 of its JSON without that entry, keys sorted, without spaces.
    """
    files = dict(_hashes(folder, sorted(set(_files(folder)) - {name})))
    sealed = {**record, "format": FORMAT, "files": files}
    sealed["checksum"] = _checksum(sealed)
    half = folder / f".{name}.half"  # a manifest is whole or missing: it tells a result from a half-written one
    half.write_text(json.dumps(sealed, indent=2) + "\n", encoding="utf-8")
    half.rename(folder / name)


def check_format(path: Path, manifest: Mapping[str, Any]) -> None:
    """Check that this version of weft understands the `manifest` at `path`.

    Raises:
        WeftError: if it is of a newer format, or says so in no number.
    """
    version = manifest.get("format", 0)
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise WeftError(f"{path}: format is {version!r}, but it must be a whole number")
    if version > FORMAT:
        by = f", by weft {manifest['weft']}" if isinstance(manifest.get("weft"), str) else ""
        raise WeftError(f"{path} was written in format {version}{by}, which this weft does not know yet: upgrade weft")


def check_contents(folder: Path) -> int:
    """Compare every file that the manifest of `folder` lists with its checksum; return how many there are.

    Raises:
        WeftError: naming what is damaged or missing, or if there is no manifest with checksums.
    """
    path, manifest = _manifest(folder, links=True)  # snapshots of the hub's cache are folders of links
    if manifest is None:
        raise WeftError(f"{folder} has no {' or '.join(MANIFESTS)} with checksums: its files cannot be checked")
    check_format(path, manifest)
    damages = [f"{name} {what}" for name, what in _damage(folder, path, manifest)]
    if damages:
        rest = f" ({len(damages)} such)" if len(damages) > 1 else ""
        raise WeftError(f"{folder}: {damages[0]}{rest}; compile it again")
    return len(manifest["files"])


def unlisted(folder: Path) -> list[str]:
    """Return names in `folder` that its manifest does not list: foreign files, or folders with nothing of ours.

    Without a manifest everything is foreign. What Python compiled of listed sources is not.
    """
    path, manifest = _manifest(folder)
    listed = {path.name, *manifest["files"]} if manifest is not None else set()
    inner = {str(parent) for name in listed for parent in PurePosixPath(name).parents}
    foreign: list[str] = []

    def visit(prefix: str) -> None:
        with os.scandir(folder / prefix) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                name = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    if name in inner:
                        visit(f"{name}/")
                    elif not (entry.name == "__pycache__" and _compiled_from(folder, prefix, listed)):
                        foreign.append(f"{name}/")
                # weft writes no links, so a link by a listed name is somebody else's.
                elif name not in listed or entry.is_symlink():
                    foreign.append(name)

    visit("")
    return foreign


def altered(folder: Path) -> list[str]:
    """Return the listed files of `folder` that are not as weft wrote them (the missing ones left out)."""
    path, manifest = _manifest(folder)
    if manifest is None:
        return []
    return [name for name, what in _damage(folder, path, manifest) if what != "is missing"]


def remove_listed(folder: Path) -> None:
    """Remove what the manifest of `folder` lists, and the folders that are empty then.

    Where something foreign remains the manifest does too: it tells the two apart the next time.
    """
    path, manifest = _manifest(folder)
    names = list(manifest["files"]) if manifest is not None else []
    for name in names:
        (folder / name).unlink(missing_ok=True)
    listed = set(names)
    for at, _, files in os.walk(folder, topdown=False):
        prefix = "" if Path(at) == folder else f"{Path(at).relative_to(folder).as_posix()}/"
        if Path(at).name == "__pycache__" and _compiled_from(folder, prefix.removesuffix("__pycache__/"), listed):
            for file in files:
                Path(at, file).unlink(missing_ok=True)
        if prefix:
            with contextlib.suppress(OSError):  # not empty: something of somebody else
                Path(at).rmdir()
    # The manifest goes last: a removal that is interrupted can go on by it.
    if {entry.name for entry in folder.iterdir()} <= {path.name}:
        path.unlink(missing_ok=True)
        folder.rmdir()


def sha256(path: Path, abandoned: Any = None) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal; cut short when `abandoned()` says so."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while not (abandoned is not None and abandoned()) and (piece := file.read(_PIECE)):
            digest.update(piece)
    return digest.hexdigest()


def _manifest(folder: Path, links: bool = False) -> tuple[Path, dict[str, Any] | None]:
    """Return the first manifest in `folder` that lists files as weft does, and its path; `links` may be one."""
    for name in MANIFESTS:
        path = folder / name
        if (path.is_symlink() and not links) or not path.is_file():
            continue
        try:
            manifest = read_json(path)
        except WeftError:  # not ours, whatever it is
            continue
        if isinstance(manifest.get("weft"), str) and _lists(manifest.get("files")):
            return path, manifest
    return folder / MANIFEST, None


def _lists(files: object) -> bool:
    """Return whether `files` maps names below the folder to checksums."""
    return isinstance(files, dict) and all(
        isinstance(digest, str) and not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
        for name, digest in files.items()
    )


def _damage(folder: Path, path: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the files that are not as `manifest` lists them, and what they are."""
    if manifest.get("checksum") != _checksum(manifest):
        yield path.name, "was modified after compilation"
    there = [name for name in manifest["files"] if (folder / name).is_file()]
    hashes = dict(_hashes(folder, there))
    for name, digest in manifest["files"].items():
        if name not in hashes:
            yield name, "is missing"
        elif hashes[name] != digest:
            yield name, "was modified after compilation"


def _checksum(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _hashes(folder: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    """Hash files on several cores at once: SHA-256 takes about 0.6 s a GB on one."""
    # Threads suffice: hashlib releases the GIL while it hashes.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        yield from zip(names, pool.map(sha256, (folder / name for name in names)), strict=True)


def _files(folder: Path) -> Iterator[str]:
    for at, _, names in os.walk(folder):
        for name in names:
            yield Path(at, name).relative_to(folder).as_posix()


def _compiled_from(folder: Path, prefix: str, listed: set[str]) -> bool:
    """Return whether the `__pycache__` below `prefix` holds nothing but bytecode of listed sources."""
    with os.scandir(folder / prefix / "__pycache__") as entries:
        return all(
            entry.is_file(follow_symlinks=False)
            and entry.name.endswith(".pyc")
            and f"{prefix}{entry.name.partition('.')[0]}.py" in listed
            for entry in entries
        )

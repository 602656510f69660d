"""Manifests: JSON files with the SHA-256 of every file in a folder that weft wrote, and of the manifest itself."""

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
SEALED = ("format", "files", "checksum")  # keys that `write_manifest` adds to a record
_PIECE = 1 << 22


def write_manifest(folder: Path, name: str, record: Mapping[str, Any]) -> None:
    """Write the manifest `name` of `folder`: `record`, a format number, and the checksums of all files and itself.

    `files` maps paths to SHA-256. `checksum` is the SHA-256 of the JSON without that key, with sorted keys and without
    spaces.
    """
    paths = {Path(at, file).relative_to(folder).as_posix() for at, _, files in os.walk(folder) for file in files}
    _seal(folder / name, {**record, "format": FORMAT, "files": dict(_hash_files(folder, sorted(paths - {name})))})


def amend_manifest(folder: Path, changes: Mapping[str, Any], files: Mapping[str, str] | None = None) -> None:
    """Replace entries of the manifest of `folder` by `changes`, and listed `files` (name → contents).
    Raise WeftError if there is no manifest, or it has been modified."""
    path, manifest = _find_manifest(folder)
    if manifest is None or manifest.get("checksum") != _compute_checksum(manifest):
        raise WeftError(f"{folder} cannot take a record: it has no unmodified {' or '.join(MANIFESTS)}")
    for name, text in (files or {}).items():
        _replace_text(folder / name, text)
        manifest["files"][name] = hash_file(folder / name)
    _seal(path, {**manifest, **changes})


def _seal(path: Path, manifest: Mapping[str, Any]) -> None:
    sealed = {key: value for key, value in manifest.items() if key != "checksum"}
    sealed["checksum"] = _compute_checksum(sealed)
    _replace_text(path, json.dumps(sealed, indent=2) + "\n")


def _replace_text(path: Path, text: str) -> None:
    half = path.with_name(f".{path.name}.half")  # renamed when complete: a folder with a manifest is a finished result
    half.write_text(text, encoding="utf-8")
    half.rename(path)


def check_format(path: Path, manifest: Mapping[str, Any]) -> None:
    """Check that this version of weft can read the `manifest` at `path`.

    Raises:
        WeftError: if its format number is newer, or not a non-negative integer.
    """
    version = manifest.get("format", 0)
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise WeftError(f"{path}: the key 'format' is {version!r}, but it must be a non-negative integer")
    if version > FORMAT:
        by = f", by weft {manifest['weft']}" if isinstance(manifest.get("weft"), str) else ""
        raise WeftError(f"{path} was written in format {version}{by}, which this weft cannot read yet: upgrade weft")


def check_contents(folder: Path) -> int:
    """Compare every file that the manifest of `folder` lists with its checksum; return the number of files.

    Raises:
        WeftError: naming a damaged or missing file; or if there is no manifest with checksums, or its format is newer.
    """
    manifest, damages = read_checked(folder)
    if damages:
        rest = f" (and {count} more file{'s' * (count > 1)})" if (count := len(damages) - 1) else ""
        raise WeftError(f"{folder} is damaged: {damages[0]}{rest}; compile it again")
    return len(manifest["files"])


def read_checked(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the manifest of `folder`, and a phrase for each damaged or missing file. Raise WeftError if there is no
    manifest with checksums, or its format is newer."""
    path, manifest = _find_manifest(folder, links=True)  # snapshots in the cache of the hub are folders of links
    if manifest is None:
        raise WeftError(f"{folder} cannot be checked: it has no {' or '.join(MANIFESTS)} with checksums of its files")
    check_format(path, manifest)
    return manifest, [f"{name} {damage}" for name, damage in _find_damage(folder, path, manifest)]


def find_unlisted(folder: Path) -> list[str]:
    """Return the relative paths in `folder` of files that its manifest does not list, of links, and of folders without
    listed files ("name/").

    Without a manifest no file is listed. ``__pycache__`` with only bytecode of listed sources is ignored.
    """
    path, manifest = _find_manifest(folder)
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
                    elif not (entry.name == "__pycache__" and _has_only_bytecode_of(folder, prefix, listed)):
                        foreign.append(f"{name}/")
                # weft writes no links, so a link with a listed name is foreign.
                elif name not in listed or entry.is_symlink():
                    foreign.append(name)

    visit("")
    return foreign


def find_altered(folder: Path) -> list[str]:
    """Return the altered files of `folder` among the manifest and listed files that exist; [] without a manifest."""
    path, manifest = _find_manifest(folder)
    if manifest is None:
        return []
    return [name for name, damage in _find_damage(folder, path, manifest) if damage != "is missing"]


def remove_listed(folder: Path) -> None:
    """Remove the files that the manifest of `folder` lists, their bytecode, and folders that are then empty.

    `folder` and the manifest stay if other files remain: the next removal needs the manifest to find listed files.
    """
    path, manifest = _find_manifest(folder)
    names = list(manifest["files"]) if manifest is not None else []
    for name in names:
        (folder / name).unlink(missing_ok=True)
    listed = set(names)
    for at, _, files in os.walk(folder, topdown=False):
        prefix = "" if Path(at) == folder else f"{Path(at).relative_to(folder).as_posix()}/"
        parent = prefix.removesuffix("__pycache__/")
        if Path(at).name == "__pycache__" and _has_only_bytecode_of(folder, parent, listed):
            for file in files:
                Path(at, file).unlink(missing_ok=True)
        if prefix:
            with contextlib.suppress(OSError):  # not empty: it has foreign files
                Path(at).rmdir()
    # The manifest goes last, so that an interrupted removal can be continued.
    if {entry.name for entry in folder.iterdir()} <= {path.name}:
        path.unlink(missing_ok=True)
        folder.rmdir()


def hash_file(path: Path, abandoned: Any = None) -> str:
    """Return the SHA-256 of the file at `path`, in hexadecimal; stop early, with a wrong value, once the function
    `abandoned` returns True."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while not (abandoned is not None and abandoned()) and (piece := file.read(_PIECE)):
            digest.update(piece)
    return digest.hexdigest()


def _find_manifest(folder: Path, links: bool = False) -> tuple[Path, dict[str, Any] | None]:
    """Return (path, content) of the manifest in `folder`, or (path, None); it may be a link only if `links`."""
    for name in MANIFESTS:
        path = folder / name
        if (path.is_symlink() and not links) or not path.is_file():
            continue
        try:
            manifest = read_json(path)
        except WeftError:  # not a manifest of weft
            continue
        if isinstance(manifest.get("weft"), str) and _is_listing(manifest.get("files")):
            return path, manifest
    return folder / MANIFEST, None


def _is_listing(files: object) -> bool:
    return isinstance(files, dict) and all(
        isinstance(digest, str) and not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
        for name, digest in files.items()
    )


def _find_damage(folder: Path, path: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, "is missing" or "was modified after compilation") for each damaged file, the manifest first."""
    if manifest.get("checksum") != _compute_checksum(manifest):
        yield path.name, "was modified after compilation"
    present = [name for name in manifest["files"] if (folder / name).is_file()]
    hashes = dict(_hash_files(folder, present))
    for name, digest in manifest["files"].items():
        if name not in hashes:
            yield name, "is missing"
        elif hashes[name] != digest:
            yield name, "was modified after compilation"


def _compute_checksum(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _hash_files(folder: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    # Threads suffice: hashlib releases the GIL while it hashes.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        yield from zip(names, pool.map(hash_file, (folder / name for name in names)), strict=True)


def _has_only_bytecode_of(folder: Path, prefix: str, listed: set[str]) -> bool:
    with os.scandir(folder / prefix / "__pycache__") as entries:
        return all(
            entry.is_file(follow_symlinks=False)
            and entry.name.endswith(".pyc")
            and f"{prefix}{entry.name.partition('.')[0]}.py" in listed
            for entry in entries
        )

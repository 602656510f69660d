"""Manifests: checksums of files, foreign and altered files, removal."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from weft.ir.errors import WeftError
from weft.ir.storage.contents import (
    MANIFEST,
    amend_manifest,
    check_contents,
    check_format,
    find_altered,
    find_unlisted,
    hash_file,
    read_checked,
    remove_listed,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a manifest of two files."""
    out = tmp_path / "model"
    (out / "inner").mkdir(parents=True)
    (out / "a.txt").write_text("a")
    (out / "inner" / "b.py").write_text("b")
    write_manifest(out, MANIFEST, {"weft": "1.0"})
    return out


def test_manifest_has_the_sha256_of_every_file_and_of_itself(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    digests = {"a.txt": hashlib.sha256(b"a").hexdigest(), "inner/b.py": hashlib.sha256(b"b").hexdigest()}
    assert (manifest["files"], manifest["weft"], manifest["format"]) == (digests, "1.0", 1)
    checksum = manifest.pop("checksum")
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    assert checksum == hashlib.sha256(text.encode()).hexdigest()
    assert check_contents(folder) == 2
    assert hash_file(folder / "a.txt") == digests["a.txt"]
    assert hash_file(folder / "a.txt", abandoned=lambda: True) == hashlib.sha256().hexdigest()


def test_altered_missing_and_foreign_files_are_found(folder: Path) -> None:
    assert find_altered(folder) == find_unlisted(folder) == []
    (folder / "a.txt").write_text("c")
    (folder / "inner" / "b.py").unlink()
    (folder / "notes.md").write_text("mine")
    (folder / "mine").mkdir()
    assert find_altered(folder) == ["a.txt"]
    assert find_unlisted(folder) == ["mine/", "notes.md"]
    with pytest.raises(WeftError, match=r"a\.txt was modified .* \(and 1 more file\); compile it again"):
        check_contents(folder)


def test_a_changed_manifest_is_noticed(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "weft": "2.0"}))
    with pytest.raises(WeftError, match=r"weft\.json was modified after compilation; compile"):
        check_contents(folder)


def test_removal_keeps_foreign_files_and_then_the_manifest(folder: Path) -> None:
    (folder / "inner" / "notes.md").write_text("mine")
    remove_listed(folder)
    assert sorted(p.name for p in folder.rglob("*")) == ["inner", "notes.md", MANIFEST]
    (folder / "inner" / "notes.md").unlink()
    remove_listed(folder)
    assert not folder.exists()


def test_folders_without_a_manifest_cannot_be_checked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / MANIFEST).write_text('{"files": {"../a": ""}, "weft": "1"}')  # outside of the folder: not a listing
    assert find_unlisted(tmp_path) == ["a.txt", MANIFEST]
    assert find_altered(tmp_path) == []
    with pytest.raises(WeftError, match=r"has no weft\.json or provenance\.json with checksums"):
        check_contents(tmp_path)


@pytest.mark.parametrize(
    ("version", "message"),
    [("1", "'format' is '1', but"), (-1, "'format' is -1, but"), (True, "is True, but"), (2, "upgrade weft")],
)
def test_formats_that_cannot_be_read_are_refused(version: object, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        check_format(Path("m"), {"format": version})
    check_format(Path("m"), {})


def test_amended_manifest_is_sealed_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    write_manifest(tmp_path, MANIFEST, {"weft": "1"})
    amend_manifest(tmp_path, {"more": [1]}, {"a.txt": "new"})
    manifest, damages = read_checked(tmp_path)
    assert (manifest["more"], manifest["weft"], damages) == ([1], "1", [])
    assert (tmp_path / "a.txt").read_text() == "new" and {p.name for p in tmp_path.iterdir()} == {"a.txt", MANIFEST}
    (tmp_path / "a.txt").write_text("other")
    assert read_checked(tmp_path)[1] == ["a.txt was modified after compilation"]


def test_modified_manifest_cannot_be_amended(tmp_path: Path) -> None:
    """Else sealing it would hide the change."""
    with pytest.raises(WeftError, match="has no unmodified"):
        amend_manifest(tmp_path, {})
    write_manifest(tmp_path, MANIFEST, {"weft": "1"})
    text = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(text.replace('"1"', '"2"'))
    with pytest.raises(WeftError, match="has no unmodified"):
        amend_manifest(tmp_path, {"more": 1})

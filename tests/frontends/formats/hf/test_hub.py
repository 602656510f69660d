"""Snapshots in the local cache of the hub, and files that lead out of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.frontends.formats.hf.hub import check_inside, find_snapshot
from weft.ir import WeftError


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cached snapshot of owner/name."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc\n")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    return repository / "snapshots" / "abc"


def test_snapshot_of_main_is_found_by_its_id(snapshot: Path) -> None:
    assert find_snapshot("owner/name") == snapshot
    for spec in ("owner/other", "name", "../owner/name", "owner/name/more"):
        assert find_snapshot(spec) is None


def test_snapshot_may_be_missing(snapshot: Path) -> None:
    snapshot.rmdir()
    assert find_snapshot("owner/name") is None


def test_files_of_a_snapshot_may_be_links_into_its_repository(snapshot: Path) -> None:
    blob = snapshot.parents[1] / "blobs" / "x"
    blob.parent.mkdir()
    blob.touch()
    (snapshot / "config.json").symlink_to(blob)
    check_inside(snapshot, snapshot / "config.json")


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "secret").touch()
    link = tmp_path / "folder" / "config.json"
    link.symlink_to(tmp_path / "secret")
    with pytest.raises(WeftError, match=r"config.json is a link to .*secret, outside the model's folder"):
        check_inside(tmp_path / "folder", link)

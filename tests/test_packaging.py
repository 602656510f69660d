"""The wheel and the sdist hold all of weft, as real files."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

WHEEL, INSTALLED = 3 << 20, 13 << 19  # most bytes of the wheel, and of its files, without bytecode
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def build(what: str, source: Path, out: Path) -> Path:
    """Run one hook of the build backend as pip would, without build isolation and so without network."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{what}", out], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


def checkout(root: Path, target: Path) -> Path:
    """Copy the files that git tracks, links as links, as a clone does."""
    git = ["git", "-c", "safe.directory=*", "checkout-index", "--all", f"--prefix={target}/"]
    subprocess.run(git, cwd=root, check=True)
    return target


@pytest.fixture(scope="module")
def clone(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    clone = checkout(root, tmp_path_factory.mktemp("clone") / "weft")
    planted = clone / "backends" / "planted" / "table.json"  # data in a folder that is no package must travel too
    planted.parent.mkdir()
    planted.touch()
    return clone


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", clone, tmp_path_factory.mktemp("wheel"))


def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("weft/")}


def test_wheel_holds_every_file(clone: Path, wheel: Path) -> None:
    package = clone / "src/weft"
    roots = [package, *(path for path in package.iterdir() if path.is_symlink())]
    expected = {
        str(PurePosixPath("weft", path.relative_to(package)))
        for folder in roots
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert files(wheel) == expected
    data = {"py.typed", "backends/viz/layout/fonts/advances.json", "backends/planted/table.json"}
    assert {f"weft/{name}" for name in data | {"ir/__init__.py"}} <= expected


def test_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    show = "import weft; print(weft.__file__, *(getattr(weft, n).__file__ for n in ('ir', 'passes', 'frontends')))"
    done = subprocess.run(
        [sys.executable, "-c", show], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(Path(shown).is_relative_to(tmp_path / "weft") for shown in done.stdout.split())


def test_wheel_stays_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        installed = sum(entry.file_size for entry in archive.infolist())
    assert wheel.stat().st_size < WHEEL and installed < INSTALLED


def test_container_context_builds_the_same_wheel(clone: Path, wheel: Path, tmp_path: Path) -> None:
    """Links of src/weft need the folders next to src, which `.dockerignore` must list as exceptions."""
    lines = (clone / ".dockerignore").read_text(encoding="utf-8").splitlines()
    context = tmp_path / "context"
    context.mkdir()
    for name in (line[1:] for line in lines if line.startswith("!")):
        copy = shutil.copytree if (clone / name).is_dir() else shutil.copy
        copy(clone / name, context / name, **({"symlinks": True} if copy is shutil.copytree else {}))
    assert files(build("wheel", context, tmp_path / "wheel")) == files(wheel)


@pytest.mark.long
def test_sdist_builds_the_same_wheel(clone: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", clone, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("weft-*")
    assert files(build("wheel", unpacked, tmp_path / "wheel")) == files(wheel)
    assert (unpacked / "LICENSE").exists() and not (unpacked / "tests").exists()

"""Installed packages: one version of each, hashed where possible, and their licences."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .licences import PAGE, SETS, licence, members, page, pins, rows

ROOT = Path(__file__).resolve().parents[1]
LOCKS = {  # requirements/ and their extras
    "demo": ("cpu",),
    "test": ("cpu", "hf", "torch", "serve", "dev"),
    "engines": ("hf", "engines"),
    "docs": ("docs",),
}
PINNED = re.compile(r"^([\w.-]+)==([\w.+-]+)([^\\\n]*)((?:\\\n +--hash=\S+ *)*)$", re.MULTILINE)


def locked(name: str) -> dict[str, tuple[str, int]]:
    """The version and the number of hashes of every package in a file of requirements/."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    return {canonicalize_name(n): (v, hashes.count("--hash=sha256:")) for n, v, _, hashes in PINNED.findall(text)}


@pytest.mark.parametrize("name", LOCKS)
def test_hashed_versions_equal_the_pins(name: str) -> None:
    found, pinned = locked(name), pins()
    assert {package: version for package, (version, _) in found.items()}.items() <= pinned.items(), "run `make lock`"
    assert not [package for package, (_, hashes) in found.items() if not hashes]
    assert "weft" not in found and "torch" not in found


@pytest.mark.parametrize("name", LOCKS)
def test_hashed_packages_equal_the_extras(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (line for extra in LOCKS[name] for line in project["optional-dependencies"][extra])
    wanted = {canonicalize_name(Requirement(line).name) for line in (*project["dependencies"], *extras)}
    assert wanted - {"torch"} <= locked(name).keys(), "run `make lock`"
    assert name in ("docs", "engines") or "setuptools" in locked(name)  # builds weft, without a network


def test_every_pin_is_used() -> None:
    assert set().union(*(members(name) for name in SETS.values())) == pins().keys()


def test_every_package_has_a_licence() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = rows(text)
    assert {name: version for name, (version, _) in table.items()} == pins(), "run `make licences`"
    assert not [name for name, (_, said) in table.items() if said.strip() in ("", "?")]
    assert text == page(text), "run `make licences`"


def test_licences_are_read_from_metadata() -> None:
    assert licence("numpy") is not None and licence("pytest") == "MIT"
    assert licence("no-such-package") is None

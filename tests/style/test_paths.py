"""Modules, classes and tests are found by name."""

from __future__ import annotations

from pathlib import Path

from .paths import classes, modules, shared_names, untested


def test_module_with_logic_has_a_test_file_at_its_path(root: Path) -> None:
    assert [path.as_posix() for path in untested(root)] == []


def test_modules_of_a_folder_have_different_names(root: Path) -> None:
    assert shared_names((f"{path.parts[0]}/.../{path.name}", path) for path in modules(root)) == {}


def test_classes_have_different_names(root: Path) -> None:
    assert shared_names(classes(root)) == {}

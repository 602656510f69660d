"""Registries: addition, lookup, order, plugins by module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from weft.ir.errors import WeftError
from weft.ir.registry import Alternatives, DuplicateName, Registry, import_plugin


def first() -> int:
    return 1


def test_names_are_in_order_of_addition_and_can_be_removed() -> None:
    registry: Registry[object] = Registry("fruit", "", "see the market")
    registry.add("pear", 1)
    registry.add("apple", first)
    registry.add("apple", first)  # the same item again is allowed
    assert [*registry.items()] == [("pear", 1), ("apple", first)]
    registry.remove("pear")
    registry.remove("pear")
    assert len(registry) == 1 and "pear" not in registry


def test_a_second_item_of_one_name_is_refused() -> None:
    registry: Registry[object] = Registry("fruit", "", "")
    registry.add("pear", 1)
    with pytest.raises(DuplicateName, match="fruit pear is declared twice, as 1 and 2; rename one of them"):
        registry.add("pear", 2)
    assert registry["pear"] == 1
    with pytest.raises(WeftError, match="fruit 3: the name must be a string, not int"):
        registry.add(3, 1)  # type: ignore[arg-type]  # refused


def test_lookup_suggests_similar_names() -> None:
    registry: Registry[int] = Registry("fruit", "", "ask the market")
    registry.add("pear", 1)
    assert registry.lookup("pear") == 1
    with pytest.raises(WeftError, match=r"unknown fruit 'peer'; did you mean pear\?"):
        registry.lookup("peer")
    with pytest.raises(WeftError, match="unknown fruit 'zzz'; ask the market"):
        registry.lookup("zzz")


def test_alternatives_are_tried_in_order() -> None:
    registry: Alternatives[str] = Alternatives("rule", "", "")
    registry.put("a", "second")
    registry.put("a", "first", first=True)
    registry.put("a", "third")
    assert registry["a"] == ["first", "second", "third"]


def test_catalogues_are_imported_before_earlier_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fruit_catalogue.py").write_text(
        "import sys\nsys.modules['fruit_registry_holder'].registry.add('pear', 1)\n"
    )
    registry: Registry[int] = Registry("fruit", "fruit_catalogue", "")
    holder = type(sys)("fruit_registry_holder")
    holder.registry = registry  # type: ignore[attr-defined]  # a module made here
    monkeypatch.setitem(sys.modules, "fruit_registry_holder", holder)
    registry.add("apple", 2)
    assert [*registry] == ["pear", "apple"]
    monkeypatch.delitem(sys.modules, "fruit_catalogue")


def test_plugins_that_cannot_be_imported_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad_plugin_example.py").write_text("1 / 0\n")
    path = [*sys.path]
    with pytest.raises(WeftError, match="there is no module no_such_plugin on the Python path or in the working"):
        import_plugin("no_such_plugin")
    with pytest.raises(WeftError, match="the module bad_plugin_example cannot be imported: ZeroDivisionError"):
        import_plugin("bad_plugin_example")
    assert sys.path == path

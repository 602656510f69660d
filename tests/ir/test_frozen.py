"""Frozen dataclasses without a decorator: equality, hashes, refused changes, and a decorator that changes nothing."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any

import pytest

from weft.ir.frozen import Frozen


class Point(Frozen):
    x: int
    y: int = 2


@dataclass(frozen=True)
class Decorated(Point):
    z: int = 3


class Named(Point, kw_only=True):
    z: int = 3


def test_subclasses_are_dataclasses() -> None:
    assert Point(1) == Point(1, 2) != Point(2)
    assert repr(replace(Point(1), x=4)) == "Point(x=4, y=2)"
    assert {Point(1), Point(1, 2)} == {Point(1)}


@pytest.mark.parametrize("made", [Point(1), Decorated(1), Named(1)])
def test_fields_cannot_be_changed(made: Any) -> None:
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        made.x = 3
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
        del made.x
    assert made.x == 1


def test_decorator_changes_nothing() -> None:
    made = Decorated(1, z=5)
    assert (made.x, made.y, made.z) == (1, 2, 5)
    assert made != Decorated(1) == Decorated(1, 2, 3) != Point(1)


def test_arguments_of_the_class_statement_reach_the_dataclass() -> None:
    assert Named(1, z=4).z == 4
    with pytest.raises(TypeError, match="positional"):
        Named(1, 2, 4)  # type: ignore[misc]

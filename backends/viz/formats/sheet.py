"""The fact sheet next to a picture: the name of a model, and one row for each of its facts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..layout.scene import Shape


@dataclass(frozen=True)
class Sheet:
    """A title, a short description, and rows of (name, formatted value)."""

    title: str
    about: str
    rows: tuple[tuple[str, str], ...]


def describe_picture(root: Shape, sheet: Sheet | None) -> str:
    """Describe a picture for screen readers: the facts of `sheet` (None: none), then the titles of its parts."""
    facts = [] if sheet is None else [sheet.about, *(f"{name}: {value}" for name, value in sheet.rows)]
    return ". ".join([*facts, f"Parts: {'; '.join(_describe_parts(root))}"]) + "."


def _describe_parts(root: Shape) -> Iterator[str]:
    for shape in root.inner:
        inner = ", ".join(s.label.title for s in shape.inner if not s.label.symbol) if shape.part.count > 1 else ""
        yield shape.label.title + shape.part.times + (f" of {inner}" if inner else "")

"""The fact sheet beside a picture: what a model is called, and its sizes, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..layout.scene import Shape


@dataclass(frozen=True)
class Sheet:
    """A title, what it is in a few words, and named facts, as they are to be read."""

    title: str
    about: str
    rows: tuple[tuple[str, str], ...]


def in_words(root: Shape, sheet: Sheet | None) -> str:
    """A picture for those who do not see it: its facts, and its parts from first to last."""
    facts = [] if sheet is None else [sheet.about, *(f"{name}: {value}" for name, value in sheet.rows)]
    return ". ".join([*facts, f"Parts: {'; '.join(_parts(root))}"]) + "."


def _parts(root: Shape) -> Iterator[str]:
    for shape in root.inner:
        inner = ", ".join(s.label.title for s in shape.inner if not s.label.symbol) if shape.part.count > 1 else ""
        yield shape.label.title + shape.part.times + (f" of {inner}" if inner else "")

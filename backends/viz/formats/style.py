"""Styles of the kinds of parts in light and dark: colours, and marks for readers who cannot distinguish colours; and
the fact sheet next to a picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..layout.scene import Shape
from ..model.network import CHANGED, KEPT, NEW, REMOVED, sign_to_kind


@dataclass(frozen=True)
class KindStyle:
    """The look of a kind of part: fill and border (`edge`) colours in light and dark, a `mark` (SVG path data within 10
    × 10 pixels), and the width (`wide`) and dash pattern of the border."""

    fill: str
    edge: str
    dark_fill: str
    dark_edge: str
    mark: str
    wide: float = 1.0
    dashes: str = ""


LOOKS = {
    "stream": KindStyle("#ffffff", "#6b7280", "#14171c", "#8b94a3", "M5 1V9M1 5H9"),
    "embedding": KindStyle("#e4f4ff", "#548aa7", "#424689", "#9c9bec", "M1 1H9V9H1ZM1 5H9M5 1V9"),
    "norm": KindStyle("#edeea4", "#7e8431", "#5b4211", "#be954a", "M0 9C4 9 3.5 1 5 1S6 9 10 9"),
    "attention": KindStyle("#e7bfa3", "#945722", "#471601", "#b45f42", "M5 1L1 9M5 1V9M5 1L9 9"),
    "position": KindStyle("#f0d7e1", "#a26481", "#3c1839", "#a65d9e", "M0 5C1.5 -1 3.5 -1 5 5S8.5 11 10 5"),
    "feed-forward": KindStyle("#ccfadb", "#34925d", "#2e4731", "#59a364", "M1 5L5 1L9 5L5 9Z"),
    "experts": KindStyle("#a9e7fe", "#0b829e", "#045465", "#4eafc9", "M1 9V5M4 9V1M7 9V6M9.5 9V3"),
    "recurrence": KindStyle("#b8c4f8", "#3f64ae", "#370e78", "#8f6db7", "M9 5A4 4 0 1 1 7 1.6M7 1.6L4.5 .8M7 1.6L6 4"),
    "linear": KindStyle("#c2c6d7", "#55658f", "#484d50", "#8ca7b7", "M1 9L9 1"),
    "tensor": KindStyle("#cac7c1", "#6a655d", "#2a2522", "#7f7570", "M1.5 1.5H8.5V8.5H1.5Z"),
    "group": KindStyle("#f4f4f2", "#6f7480", "#20252d", "#8b94a3", "M1 3.5L5 1L9 3.5L5 6ZM1 6.5L5 9L9 6.5"),
    "input": KindStyle("#ffffff", "#6b7280", "#14171c", "#8b94a3", "M2 1L8 5L2 9"),
}

SIGNS = {
    sign_to_kind(KEPT): KindStyle("#f6f7f8", "#7d848f", "#1b1f26", "#737c89", "M1 3.5H9M1 6.5H9"),
    sign_to_kind(REMOVED): KindStyle("#fbd9c8", "#b23c07", "#4d1408", "#f08a5a", "M1 5H9", 2.0, "7 4"),
    sign_to_kind(NEW): KindStyle("#cfe3fb", "#1258a6", "#123a69", "#7cb4f2", "M5 1V9M1 5H9", 3.0),
    sign_to_kind(CHANGED): KindStyle(
        "#f8eba6", "#84680a", "#5a5212", "#d8bb45", "M0 6C2 1 4 2 5 5S8 9 10 4", 2.0, "9 3 2 3"
    ),
}
EVERY = LOOKS | SIGNS


@dataclass(frozen=True)
class Paper:
    """The colours of everything except kinds of operations (`KindStyle`): page (`paper`), text (`ink`), secondary text
    (`soft`), lines (`line`), open parts (`open`), thin rules (`rule`), the selected part (`chosen`) and search results
    (`found`)."""

    paper: str
    ink: str
    soft: str
    line: str
    open: str
    rule: str
    chosen: str
    found: str


LIGHT = Paper("#ffffff", "#1f2430", "#474e5b", "#3b4252", "#fafaf8", "#d9dce1", "#c2005a", "#7a4dff")
DARK = Paper("#14171c", "#e8eaee", "#c0c7d1", "#aab3c2", "#1a1e25", "#3a424e", "#ff6aa6", "#a98bff")


def list_colours(dark: bool) -> dict[str, str]:
    """Return all colours, keyed by a kind (its fill), a kind + "-edge" (its border), or a field of `Paper`."""
    palette = dict(vars(DARK if dark else LIGHT))
    for kind, look in EVERY.items():
        palette[kind] = look.dark_fill if dark else look.fill
        palette[f"{kind}-edge"] = look.dark_edge if dark else look.edge
    return palette


def format_variables() -> str:
    """Return the CSS rules that define all colours as variables; the dark colours apply under `.dark`."""
    return f":root{{{_join_variables(list_colours(False))}}}\n:root.dark{{{_join_variables(list_colours(True))}}}"


def format_borders(selector: str) -> str:
    """Return CSS rules for wide or dashed borders of kinds; `selector` is a format string with the field `kind`."""
    return "\n".join(
        f"{selector.format(kind=kind)}{{stroke-width:{look.wide:g};stroke-dasharray:{look.dashes or 'none'}}}"
        for kind, look in SIGNS.items()
        if look.wide != 1
    )


def _join_variables(colours: dict[str, str]) -> str:
    return ";".join(f"--{name}:{value}" for name, value in colours.items())


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

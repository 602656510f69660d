"""The font embedded in pictures, and the width of text in it."""

from __future__ import annotations

import base64
import functools
import json
from importlib.resources import files

FONT = files(__package__) / "fonts"
WEIGHTS = {False: "400", True: "600"}


@functools.cache
def load_advances(bold: bool) -> dict[str, int]:
    """Return the advance width of each character of the font, in thousandths of the font size."""
    table: dict[str, int] = json.loads((FONT / "advances.json").read_text(encoding="utf-8"))[WEIGHTS[bold]]
    return table


def measure_text(text: str, size: float, bold: bool = False) -> float:
    """Return the width of `text` in pixels at font size `size`; a character that the font lacks counts as a W."""
    wide = load_advances(bold)
    return sum(wide.get(c, wide["W"]) for c in text) * size / 1000


def join_lines(text: str) -> str:
    """Return `text` on one line: each run of whitespace and control characters becomes one space."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def wrap_text(text: str, room: float, size: float, bold: bool = False) -> list[str]:
    """Split `text` into lines that fit into `room` pixels; a wider word gets a line to itself."""
    lines: list[str] = []
    for word in text.split():
        if lines and measure_text(f"{lines[-1]} {word}", size, bold) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def format_font_faces() -> str:
    """Return the CSS @font-face rules that embed both weights of the font."""
    rules = ""
    for weight in WEIGHTS.values():
        data = base64.b64encode((FONT / f"inter-{weight}.ttf").read_bytes()).decode()
        rules += f"@font-face{{font-family:'Inter W';font-weight:{weight};src:url(data:font/ttf;base64,{data})}}"
    return rules

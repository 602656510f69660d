"""The font that pictures carry with them, and how wide text is in it."""

from __future__ import annotations

import base64
import functools
import json
from importlib.resources import files

FONT = files(__package__) / "fonts"
WEIGHTS = {False: "400", True: "600"}


@functools.cache
def advances(bold: bool) -> dict[str, int]:
    """Return the advance width of every letter, in thousandths of the font size."""
    table: dict[str, int] = json.loads((FONT / "advances.json").read_text(encoding="utf-8"))[WEIGHTS[bold]]
    return table


def width(text: str, size: float, bold: bool = False) -> float:
    """The width of `text` in pixels, set at `size` pixels; a letter that the font lacks counts as its widest one."""
    wide = advances(bold)
    widest = wide["W"]
    return sum(wide.get(c, widest) for c in text) * size / 1000


def fitted(text: str, room: float, size: float, bold: bool = False) -> str:
    """`text`, or as much of its beginning as fits into `room` pixels, with an ellipsis."""
    if width(text, size, bold) <= room:
        return text
    while text and width(text + "…", size, bold) > room:
        text = text[:-1]
    return text.rstrip() + "…"


def one_line(text: str) -> str:
    """`text` without line ends and without what steers terminals."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def wrapped(text: str, room: float, size: float, bold: bool = False) -> list[str]:
    """`text` in lines that fit into `room` pixels, but for words that are wider."""
    lines: list[str] = []
    for word in text.split():
        if lines and width(f"{lines[-1]} {word}", size, bold) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def faces() -> str:
    """The fonts, as rules of a style sheet."""
    rules = ""
    for weight in WEIGHTS.values():
        data = base64.b64encode((FONT / f"inter-{weight}.ttf").read_bytes()).decode()
        rules += f"@font-face{{font-family:'Inter W';font-weight:{weight};src:url(data:font/ttf;base64,{data})}}"
    return rules

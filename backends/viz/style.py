"""How kinds of parts look, on paper and at night: colours, and marks for those who see colours otherwise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """Of a kind: the colours of its boxes and of their borders, light and dark, and its mark, drawn in lines within
    10 × 10 pixels (SVG path data)."""

    fill: str
    edge: str
    dark_fill: str
    dark_edge: str
    mark: str


LOOKS = {
    "stream": Look("#ffffff", "#6b7280", "#14171c", "#8b94a3", "M5 1V9M1 5H9"),
    "embedding": Look("#e4f4ff", "#548aa7", "#424689", "#9c9bec", "M1 1H9V9H1ZM1 5H9M5 1V9"),
    "norm": Look("#edeea4", "#7e8431", "#5b4211", "#be954a", "M0 9C4 9 3.5 1 5 1S6 9 10 9"),
    "attention": Look("#e7bfa3", "#945722", "#471601", "#b45f42", "M5 1L1 9M5 1V9M5 1L9 9"),
    "position": Look("#f0d7e1", "#a26481", "#3c1839", "#a65d9e", "M0 5C1.5 -1 3.5 -1 5 5S8.5 11 10 5"),
    "feed-forward": Look("#ccfadb", "#34925d", "#2e4731", "#59a364", "M1 5L5 1L9 5L5 9Z"),
    "experts": Look("#a9e7fe", "#0b829e", "#045465", "#4eafc9", "M1 9V5M4 9V1M7 9V6M9.5 9V3"),
    "recurrence": Look("#b8c4f8", "#3f64ae", "#370e78", "#8f6db7", "M9 5A4 4 0 1 1 7 1.6M7 1.6L4.5 .8M7 1.6L6 4"),
    "linear": Look("#c2c6d7", "#55658f", "#484d50", "#8ca7b7", "M1 9L9 1"),
    "tensor": Look("#cac7c1", "#6a655d", "#2a2522", "#7f7570", "M1.5 1.5H8.5V8.5H1.5Z"),
    "group": Look("#f4f4f2", "#6f7480", "#20252d", "#8b94a3", "M1 3.5L5 1L9 3.5L5 6ZM1 6.5L5 9L9 6.5"),
    "input": Look("#ffffff", "#6b7280", "#14171c", "#8b94a3", "M2 1L8 5L2 9"),
}


@dataclass(frozen=True)
class Paper:
    """The colours around: of the page, of text, of text that says less, of lines, of an open part, of what is chosen,
    and of what a search found."""

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


def variables() -> str:
    """The colours as variables of a style sheet, those of the night under `.dark`."""
    light = vars(LIGHT) | {k: v for kind, x in LOOKS.items() for k, v in ((kind, x.fill), (f"{kind}-edge", x.edge))}
    dark = vars(DARK) | {
        k: v for kind, x in LOOKS.items() for k, v in ((kind, x.dark_fill), (f"{kind}-edge", x.dark_edge))
    }
    return f":root{{{_listed(light)}}}\n:root.dark{{{_listed(dark)}}}"


def _listed(colours: dict[str, str]) -> str:
    return ";".join(f"--{name}:{value}" for name, value in colours.items())

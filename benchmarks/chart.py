"""Line charts with logarithmic axes, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 640, 400, 70, 40, 50, 150
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")

Points = Sequence[tuple[float, float]]


def save_chart(path: Path, title: str, x_label: str, y_label: str, series: Mapping[str, Points]) -> None:
    """Draw `series`, points (x, y) by name, into the file `path`; all numbers are positive.

    x is marked at the points, y at the powers of ten.
    """
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points]
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def across(x: float) -> float:
        return LEFT + (right - LEFT) * math.log(x / xs[0]) / max(math.log(xs[-1] / xs[0]), 1e-9)

    def up(y: float) -> float:
        return bottom - (bottom - TOP) * (math.log10(y) - low) / max(high - low, 1)

    def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'

    def line(points: Points, colour: str, width: float = 1.0) -> str:
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        return f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    parts = [text((LEFT + right) / 2, TOP - 16, title, more=' font-weight="bold"')]
    parts.append(text((LEFT + right) / 2, HEIGHT - 10, x_label))
    parts.append(text(18, (TOP + bottom) / 2, y_label, more=f' transform="rotate(-90 18 {(TOP + bottom) / 2})"'))
    for x in xs:
        parts.append(line([(across(x), TOP), (across(x), bottom)], "#e5e5e5"))
        parts.append(text(across(x), bottom + 18, f"{x:g}"))
    for power in range(low, high + 1):
        y = 10.0**power
        parts.append(line([(LEFT, up(y)), (right, up(y))], "#e5e5e5"))
        parts.append(text(LEFT - 8, up(y) + 4, f"{y:g}", "end"))
    for i, ((name, points), colour) in enumerate(zip(series.items(), COLOURS, strict=False)):
        drawn = [(across(x), up(y)) for x, y in points]
        parts.append(line(drawn, colour, 2))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in drawn]
        parts.append(text(right + 10, TOP + 12 + 18 * i, name, "start", f' fill="{colour}"'))
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    body = "\n".join(parts)
    path.write_text(f'{frame} font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n')

"""Line charts as SVG text, their axes logarithmic or linear."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 640, 400, 70, 40, 50, 150
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")

Points = Sequence[tuple[float, float]]


def save_chart(
    path: Path, title: str, x_label: str, y_label: str, series: Mapping[str, Points], *, linear: bool = False
) -> None:
    """Draw `series`, points (x, y) by name, into the file `path`.

    On logarithmic axes all numbers are positive, x is marked at the points and y at the powers of ten; on linear ones
    both are marked at round numbers.
    """
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    scale = float if linear else math.log10
    marked_x = _round_numbers(xs[0], xs[-1]) if linear else xs
    marked_y = _round_numbers(min(ys), max(ys)) if linear else _powers(min(ys), max(ys))

    def across(x: float) -> float:
        return LEFT + (right - LEFT) * _share(scale(x), scale(marked_x[0]), scale(marked_x[-1]))

    def up(y: float) -> float:
        return bottom - (bottom - TOP) * _share(scale(y), scale(marked_y[0]), scale(marked_y[-1]))

    def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'

    def line(points: Points, colour: str, width: float = 1.0) -> str:
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        return f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    parts = [text((LEFT + right) / 2, TOP - 16, title, more=' font-weight="bold"')]
    parts.append(text((LEFT + right) / 2, HEIGHT - 10, x_label))
    parts.append(text(18, (TOP + bottom) / 2, y_label, more=f' transform="rotate(-90 18 {(TOP + bottom) / 2})"'))
    for x in marked_x:
        parts.append(line([(across(x), TOP), (across(x), bottom)], "#e5e5e5"))
        parts.append(text(across(x), bottom + 18, f"{x:g}"))
    for y in marked_y:
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


def _share(value: float, low: float, high: float) -> float:
    """Where `value` is on the way from `low` to `high`."""
    return (value - low) / max(high - low, 1e-9)


def _powers(low: float, high: float) -> list[float]:
    """The powers of ten around `low` to `high`."""
    return [10.0**p for p in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]


def _round_numbers(low: float, high: float) -> list[float]:
    """At most eight multiples of 1, 2 or 5 times a power of ten around `low` to `high`."""
    unit = 10.0 ** math.floor(math.log10(max(high - low, 1e-9)) - 1)
    for step in (unit * factor for factor in (1, 2, 5, 10, 20, 50)):
        first, last = math.floor(low / step), math.ceil(high / step)
        if last - first < 8:
            break
    return [round(n * step, 9) for n in range(first, last + 1)]

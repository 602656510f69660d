"""A frame with two axes, logarithmic or linear, and the grid and numbers along them, as parts of an SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..formats.svg import text
from ..layout.positions import Point

MOST = 7  # numbers along an axis
SMALLEST = 1e-12


@dataclass(frozen=True)
class Axis:
    """Numbers from `low` to `high`, `marks` of them written with `spelled`; `log`: equal ratios are equally long."""

    low: float
    high: float
    marks: tuple[float, ...]
    spelled: Callable[[float], str]
    log: bool = False

    def share(self, value: float) -> float:
        """Return the share that `value` is on the way from `low` to `high`."""
        scale = (lambda x: math.log10(max(x, SMALLEST))) if self.log else float
        return (scale(value) - scale(self.low)) / max(scale(self.high) - scale(self.low), SMALLEST)


def linear(values: Sequence[float], spelled: Callable[[float], str] = "{:g}".format, zero: bool = False) -> Axis:
    """An axis around `values` marked at multiples of 1, 2 or 5 times a power of ten, from 0 on if `zero`."""
    low, high = (0.0 if zero else min(values)), max(values)
    step = 10.0 ** math.floor(math.log10(max(high - low, abs(high) * 0.01, SMALLEST)) - 1)
    step = next(s for s in (step * factor for factor in (1, 2, 5, 10, 20, 50, 100)) if (high - low) / s < MOST - 1)
    first, last = math.floor(low / step + 1e-9), max(math.ceil(high / step - 1e-9), math.floor(low / step + 1e-9) + 1)
    marks = tuple(round(n * step, 12) for n in range(first, last + 1))
    return Axis(marks[0], marks[-1], marks, spelled)


def logarithmic(values: Sequence[float], spelled: Callable[[float], str] = "{:g}".format) -> Axis:
    """An axis around `values`, all positive, marked at 1, 2 and 5 times powers of ten, or at some powers alone."""
    low, high = min(values), max(values)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for digits in ((1, 2, 5), (1, 3), (1,)):
        marks = [d * 10.0**p for p in range(first, last + 1) for d in digits]
        below = max((m for m in marks if m <= low * 1.0001), default=marks[0])
        above = min((m for m in marks if m >= high * 0.9999), default=marks[-1])
        if below == above:
            above = min((m for m in marks if m > above), default=above * 10)
        marks = [m for m in marks if below <= m <= above]
        if len(marks) <= MOST:
            break
    every = -(-len(marks) // MOST)
    return Axis(marks[0], marks[-1], tuple(marks[::every]), spelled, log=True)


def powers_of_two(values: Sequence[float]) -> Axis:
    """A logarithmic axis around `values`, all positive, marked at the powers of two."""
    first, last = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    marks = tuple(2.0**p for p in range(first, max(last, first + 1) + 1))
    return Axis(marks[0], marks[-1], marks, "{:g}".format, log=True)


def of_bytes(values: Sequence[float]) -> Axis:
    """An axis from 0 on around numbers of bytes, marked at round numbers of their binary unit."""
    power = min(int(math.log(max(*values, 1), 1024)), 4)
    unit, name = 1024.0**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
    axis = linear([value / unit for value in values], zero=True)
    marks = tuple(mark * unit for mark in axis.marks)
    return Axis(0.0, marks[-1], marks, lambda n: f"{round(n / unit, 9):g} {name}" if n else "0")


@dataclass(frozen=True)
class Frame:
    """A rectangle in which `across` and `up` are drawn, with a title above; `x`, `y` is its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    across: Axis
    up: Axis

    def at(self, x: float, y: float) -> Point:
        """Return the point of the numbers `x` and `y`."""
        return self.x + self.width * self.across.share(x), self.y + self.height * (1 - self.up.share(y))

    def grid(self, title: str, below: str = "") -> Iterator[str]:
        """The title, lines at the marks with their numbers, and what the horizontal axis is."""
        bottom, right = self.y + self.height, self.x + self.width
        yield f'<text class="t" x="{self.x:g}" y="{self.y - 14:g}">{text(title)}</text>'
        for mark in self.up.marks:
            _, y = self.at(self.across.low, mark)
            yield f'<path class="rule" d="M{self.x:g} {y:.1f}H{right:g}"/>'
            yield f'<text class="s e" x="{self.x - 8:g}" y="{y + 4:.1f}">{text(self.up.spelled(mark))}</text>'
        for mark in self.across.marks:
            x, _ = self.at(mark, self.up.low)
            yield f'<path class="rule" d="M{x:.1f} {bottom:g}v5"/>'
            yield f'<text class="s m" x="{x:.1f}" y="{bottom + 20:g}">{text(self.across.spelled(mark))}</text>'
        yield f'<path class="axis" d="M{self.x:g} {bottom:g}H{right:g}"/>'
        if below:
            yield f'<text class="s m" x="{self.x + self.width / 2:g}" y="{bottom + 40:g}">{text(below)}</text>'

"""Models side by side as a chart: quality against size, the error after each layer, the bits of each layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...readable import size
from ..formats.style import colours
from ..formats.svg import ABOUT, AROUND, NAME, text
from ..layout.font import faces, width, wrapped
from ..layout.positions import Point
from ..layout.scene import LINE, TITLE
from .axes import SMALLEST, Axis, Frame, logarithmic, of_bytes, powers_of_two

# Kinds of parts whose borders the lines take their colours from; they differ in lightness, too.
SERIES = ("recurrence", "attention", "feed-forward", "position", "experts", "norm", "linear", "embedding")
# Marks within 10 × 10 pixels around 0, 0, for readers who cannot tell colours apart.
MARKS = ("M-4.5 0A4.5 4.5 0 1 0 4.5 0A4.5 4.5 0 1 0 -4.5 0Z", "M-4-4H4V4H-4Z", "M0-5.5L5.5 0L0 5.5L-5.5 0Z",
         "M0-5L5 4H-5Z", "M0 5L5-4H-5Z")  # fmt: skip
WIDE, HIGH, GAP = 470.0, 430.0, 96.0  # of the frame of sizes, and the space between frames
ROW = 22.0  # the height of a line of the legend


@dataclass(frozen=True)
class Candidate:
    """A model: its bytes, what it lost against the original (None: nothing was measured), the relative error after each
    layer and the bits of a number of each, where they are known."""

    name: str
    size: int
    lost: float | None
    errors: Mapping[str, float]
    bits: Mapping[str, float]
    facts: str = ""


def trade_off(
    title: str, about: str, measure: str, original: Candidate, others: Sequence[Candidate], dark: bool = False
) -> str:
    """Draw `others` against `original`; `measure` is what `lost` counts, of which less is better. Frames of layers are
    drawn if anything is known of a layer."""
    palette = colours(dark)
    style = {c.name: _Style(i, palette[f"{SERIES[i % len(SERIES)]}-edge"]) for i, c in enumerate(others)}
    parts, y, right = list[str](), AROUND + NAME, AROUND + 52 + WIDE + GAP
    layers = list(dict.fromkeys(layer for c in (original, *others) for layer in (*c.errors, *c.bits)))
    w = round(right + (WIDE if layers else 0) + AROUND)
    parts.append(f'<text class="name" x="{AROUND:g}" y="{y:g}">{text(title)}</text>')
    for line in wrapped(about, w - 2 * AROUND, ABOUT):
        y += 20
        parts.append(f'<text class="about s" x="{AROUND:g}" y="{y:g}">{text(line)}</text>')
    top = y + 56
    parts += _sizes(top, measure, original, others, style)
    half = (HIGH - GAP) / 2
    lines = (
        ("error of the residual stream, relative", {c.name: c.errors for c in others}, True),
        ("bits of a weight", {c.name: c.bits for c in (original, *others)}, False),
    )
    for i, (label, series, log) in enumerate(lines if layers else ()):
        parts += _by_layer(Box(right, top + i * (half + GAP), half), label, layers, series, log, style)
    top += HIGH + 70
    rows = [(f"{original.name}, the original", original, None), *((c.name, c, style[c.name]) for c in others)]
    for i, (name, candidate, own) in enumerate(rows):
        parts += _row(top + i * ROW, name, candidate, own, w - 2 * AROUND)
    h = round(top + len(rows) * ROW + AROUND)
    rules = [
        f"text{{font-family:'Inter W',sans-serif;font-size:{LINE:g}px;fill:{palette['ink']};font-kerning:none}}",
        f".t{{font-size:{TITLE:g}px;font-weight:600}} .m{{text-anchor:middle}} .e{{text-anchor:end}}",
        f".s{{fill:{palette['soft']}}} .name{{font-size:{NAME:g}px;font-weight:600}} .about{{font-size:{ABOUT:g}px}}",
        f".paper{{fill:{palette['paper']}}} .rule{{stroke:{palette['rule']}}} .axis{{stroke:{palette['line']}}}",
        f".original{{stroke:{palette['soft']};fill:none;stroke-width:1.6;stroke-dasharray:5 4}}",
        f".front{{stroke:{palette['soft']};fill:none;stroke-width:1.2}} .l{{fill:none;stroke-width:2}}",
        f".dot{{stroke:{palette['paper']};stroke-width:1.2}}",
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img" '
            'aria-labelledby="title desc">',
            f'<title id="title">{text(title)}</title>',
            f'<desc id="desc">{text(". ".join([about, *(_told(c, measure) for c in (original, *others))]))}.</desc>',
            "<style>" + "\n".join([faces(), *rules]) + "</style>",
            f'<rect class="paper" width="{w}" height="{h}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


@dataclass(frozen=True)
class Box:
    """The upper left corner of a frame of layers, and its height."""

    x: float
    y: float
    height: float


@dataclass(frozen=True)
class _Style:
    """The colour of a candidate, and the mark at its place among them."""

    index: int
    colour: str

    def dot(self, at: Point) -> str:
        """Its mark at a point."""
        mark = MARKS[self.index % len(MARKS)]
        return f'<path class="dot" transform="translate({at[0]:.1f} {at[1]:.1f})" d="{mark}" fill="{self.colour}"/>'


def _sizes(
    top: float, measure: str, original: Candidate, others: Sequence[Candidate], style: Mapping[str, _Style]
) -> Iterator[str]:
    """Draw losses against bytes, with the models that no other beats in both, joined by a line."""
    measured = [c for c in others if c.lost is not None and c.lost > 0]
    x = of_bytes([float(c.size) for c in (original, *others)])
    losses = [max(c.lost or 0.0, SMALLEST) for c in measured]
    frame = Frame(AROUND + 52, top, WIDE, HIGH, x, logarithmic(losses or [0.1, 1.0], _plain))
    yield from frame.grid(f"{measure}, less is better", "bytes of the weights")
    at, _ = frame.at(float(original.size), frame.up.low)
    yield f'<path class="original" d="M{at:.1f} {top:g}V{top + HIGH:g}"/>'
    near = at + 6 + width("original", LINE) > frame.x + WIDE
    side, away = ("e s", -6) if near else ("s", 6)
    yield f'<text class="{side}" x="{at + away:.1f}" y="{top + 14:g}">original</text>'
    places = {c.name: frame.at(float(c.size), max(c.lost or 0.0, SMALLEST)) for c in measured}
    front = [c for c in measured if not any(o is not c and _beats(o, c) for o in measured)]
    corners = [places[c.name] for c in sorted(front, key=lambda c: c.size)]
    if len(corners) > 1:
        yield f'<path class="front" d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in corners)}"/>'
    taken: list[tuple[float, float, float]] = []  # of labels: from, to, y
    for c in sorted(measured, key=lambda c: places[c.name][1]):
        px, py = places[c.name]
        label = _short(c.name)
        wide = width(label, LINE)
        left = px + 10 if px + 10 + wide < frame.x + WIDE else px - 10 - wide
        y = py + 4
        while any(a < left + wide and left < b and abs(y - t) < 15 for a, b, t in taken):
            y += 3
        taken.append((left, left + wide, y))
        yield f'<text x="{left:.1f}" y="{y:.1f}">{text(label)}</text>'
    yield from (style[c.name].dot(places[c.name]) for c in measured)


def _beats(one: Candidate, other: Candidate) -> bool:
    return one.size <= other.size and (one.lost or 0.0) < (other.lost or 0.0)


def _by_layer(
    box: Box,
    title: str,
    layers: Sequence[str],
    series: Mapping[str, Mapping[str, float]],
    log: bool,
    style: Mapping[str, _Style],
) -> Iterator[str]:
    """A line for each of `series`, by layer."""
    numbers = [n for values in series.values() for n in values.values() if n > 0]
    if not numbers:
        yield f'<text class="t" x="{box.x:g}" y="{box.y - 14:g}">{text(title)}</text>'
        yield f'<text class="s" x="{box.x:g}" y="{box.y + 14:g}">not measured</text>'
        return
    places = {layer: float(i) for i, layer in enumerate(layers)}
    every = -(-len(layers) // 12)
    named = {float(i): layer.rpartition(".")[2] for i, layer in enumerate(layers) if i % every == 0}
    axis = Axis(-0.3, len(layers) - 0.7, tuple(named), lambda n: named[n])
    up = logarithmic(numbers, _plain) if log else powers_of_two(numbers)
    frame = Frame(box.x, box.y, WIDE, box.height, axis, up)
    yield from frame.grid(title, "layer" if not log else "")
    for name, values in series.items():
        points = [frame.at(places[layer], n) for layer, n in values.items() if n > 0]
        if not points:
            continue
        path = f'd="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"'
        own = style.get(name)
        yield f'<path class="original" {path}/>' if own is None else f'<path class="l" stroke="{own.colour}" {path}/>'
        if own is not None and len(points) <= 40:
            yield from map(own.dot, points)


def _row(y: float, name: str, candidate: Candidate, own: _Style | None, room: float) -> Iterator[str]:
    """A line of the legend."""
    x = AROUND + 52
    if own is None:
        yield f'<path class="original" d="M{x - 12:g} {y - 4:g}h24"/>'
    else:
        yield f'<path class="l" stroke="{own.colour}" d="M{x - 12:g} {y - 4:g}h24"/>' + own.dot((x, y - 4))
    facts = f"{size(candidate.size)}{f' · {candidate.facts}' if candidate.facts else ''}"
    shown = next(iter(wrapped(name, room - 40 - width(facts, LINE), LINE)), name)
    yield f'<text x="{x + 22:g}" y="{y:g}">{text(shown)}<tspan class="s" dx="12">{text(facts)}</tspan></text>'


def _short(name: str, most: int = 34) -> str:
    """A name for beside a point: the end of a path, cut where it is long."""
    last = name.rstrip("/").rpartition("/")[2] if "{" not in name else name
    return last if len(last) <= most else f"{last[: most - 1]}…"


def _plain(number: float) -> str:
    return f"{number:g}" if 1e-3 <= number < 1e4 else f"{number:.0e}".replace("e-0", "e-")


def _told(candidate: Candidate, measure: str) -> str:
    lost = "" if candidate.lost is None else f", {measure} {candidate.lost:.3g}"
    return f"{candidate.name}: {size(candidate.size)}{lost}"

"""Pictures as SVG with fact sheet, legend and the embedded font that the layout was measured with; as PNG by resvg."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator
from importlib.resources import as_file
from xml.sax.saxutils import escape, quoteattr

from weft.ir.errors import WeftError

from ..layout.coordinates import GAP, HEAD, PAD, PlacedShape, Point, place_shapes
from ..layout.font import FONT, format_font_faces, measure_text, wrap_text
from ..layout.scene import ICON, LEADING, LINE, TITLE, Shape
from ..model.labels import MEANINGS
from .style import EVERY, SIGNS, Sheet, describe_picture, format_borders, list_colours

MARGIN, SHEET_GAP, SHEET = 28.0, 40.0, 320.0  # the margin, the gap between picture and sheet, the width of a sheet
NAMES, ROW = 120.0, 18.0  # the width of the names on a sheet, the height of its lines
NAME, ABOUT = 22.0, 12.0  # sizes of text
UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
ARROW = (
    '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="tip" d="M0 1 7 4 0 7z"/></marker>'
)


def render_svg(root: Shape, opened: Collection[str], sheet: Sheet, dark: bool = False) -> str:
    """Return the SVG of `root`, with the shapes whose keys are in `opened` open, the fact sheet and a legend."""
    placed = place_shapes(root, opened)
    wide, high = measure_drawing(placed)
    head_lines, side_lines = list(_draw_heading(sheet, wide + SHEET_GAP + SHEET)), list(_draw_sheet(sheet, placed))
    left, top = MARGIN + wide + SHEET_GAP, MARGIN + (head_lines[-1][0] + 24 if head_lines else 0)
    w, h = round(left + SHEET + MARGIN), round(top + max(high, side_lines[-1][0]) + MARGIN)
    palette = list_colours(dark)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img" '
            'aria-labelledby="title desc">',
            f'<title id="title">{escape_text(sheet.title)}</title>',
            f'<desc id="desc">{escape_text(describe_picture(root, sheet))}</desc>',
            f"<style>{format_font_faces()}\n{format_rules(palette.__getitem__)}</style>",
            f"<defs>{ARROW}</defs>",
            f'<rect class="paper" width="{w}" height="{h}"/>',
            *(f'<g transform="translate({MARGIN:g} {MARGIN:g})">{line}</g>' for _, line in head_lines),
            f'<g transform="translate({left:g} {top:g})">',
            *(line for _, line in side_lines),
            "</g>",
            f'<g transform="translate({MARGIN:g} {top:g})">',
            *draw_contents(placed),
            "</g>",
            "</svg>",
            "",
        ]
    )


def measure_drawing(placed: PlacedShape) -> Point:
    """Return the size (width, height) in pixels of the drawing that `draw_contents` yields from (0, 0)."""
    return placed.width - 2 * PAD, placed.height - HEAD - 2 * GAP


def draw_contents(placed: PlacedShape) -> Iterator[str]:
    """Yield SVG elements for the contents of the open part `placed`, without its frame, moved to begin at (0, 0)."""
    yield f'<g transform="translate({-placed.x - PAD:g} {-placed.y - HEAD - GAP:g})">'
    for inner in placed.inner:
        yield from _draw_part(inner)
    yield from _draw_wires(placed)
    yield "</g>"


def format_rules(colour: Callable[[str], str]) -> str:
    """Return the CSS rules of SVG pictures; `colour` maps a name of `list_colours` to a CSS value."""
    rules = [
        # No kerning: widths are measured as sums of advances.
        f"text{{font-family:'Inter W',sans-serif;font-size:{LINE:g}px;fill:{colour('ink')};font-kerning:none}}",
        f".t{{font-size:{TITLE:g}px;font-weight:600}} .m{{text-anchor:middle}} .s{{fill:{colour('soft')}}}",
        f".name{{font-size:{NAME:g}px;font-weight:600}} .about{{font-size:{ABOUT:g}px}}",
        f".paper{{fill:{colour('paper')}}} .rule{{stroke:{colour('rule')}}} .tip{{fill:{colour('line')}}}",
        f".w,.sign{{fill:none;stroke:{colour('line')};stroke-width:1.4}} .w{{stroke-linejoin:round}}",
        f"circle{{fill:{colour('paper')};stroke:{colour('stream-edge')};stroke-width:1.4}}",
        ".mark{fill:none;stroke-width:1.5;stroke-linejoin:round;stroke-linecap:round}",
    ]
    for kind in EVERY:
        edge = colour(f"{kind}-edge")
        rules.append(f".k-{kind}>rect{{fill:{colour(kind)};stroke:{edge}}} .k-{kind}>.mark{{stroke:{edge}}}")
    rules.append(f".open>rect{{fill:{colour('open')}}} .times>rect{{fill:{colour('paper')};stroke:{colour('soft')}}}")
    rules += [f".k-{sign}>circle{{fill:{colour(sign)};stroke:{colour(f'{sign}-edge')}}}" for sign in SIGNS]
    return "\n".join([*rules, format_borders(".k-{kind}:not(.open)>:is(rect,circle)")])


def escape_text(plain: str) -> str:
    """Return `plain` escaped for the text of an XML element, with each character that XML forbids replaced by �."""
    return escape(UNPRINTABLE.sub("�", plain))


# -- parts


def _draw_part(p: PlacedShape) -> Iterator[str]:
    label = p.shape.label
    style = quoteattr(f"k-{label.kind}" + (" open" if p.open else ""))
    yield f"<g class={style}><title>{escape_text(p.shape.key)}</title>"
    yield from _draw_circle(p) if label.symbol else _draw_box(p)
    for inner in p.inner:
        yield from _draw_part(inner)
    yield from _draw_wires(p)
    yield "</g>"


def _draw_circle(p: PlacedShape) -> Iterator[str]:
    cx, cy, r, d = p.x + p.width / 2, p.y + p.height / 2, p.width / 2, 5
    yield f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="{r:g}"/>'
    if p.shape.label.symbol == "+":
        yield f'<path class="sign" d="M{cx - d:.1f} {cy:.1f}h{2 * d}M{cx:.1f} {cy - d:.1f}v{2 * d}"/>'
    else:
        yield _draw_text(p.shape.label.symbol, cx, cy + 4.5, "t m")


def _draw_box(p: PlacedShape) -> Iterator[str]:
    label = p.shape.label
    yield f'<rect x="{p.x:.1f}" y="{p.y:.1f}" width="{p.width:.1f}" height="{p.height:.1f}" rx="8"/>'
    times = p.shape.part.times.strip()
    pill = measure_text(times, TITLE, True) + 16 if times else 0
    wide = ICON + measure_text(label.title, TITLE, True) + (8 + pill if times else 0)
    x = p.x + (12 if p.open else (p.width - wide) / 2)
    yield f'<path class="mark" transform="translate({x:.1f} {p.y + 9.5:.1f})" d="{EVERY[label.kind].mark}"/>'
    yield _draw_text(label.title, x + ICON, p.y + 19, "t")
    if times:
        left = x + wide - pill
        yield f'<g class="times"><rect x="{left:.1f}" y="{p.y + 5:.1f}" width="{pill:.1f}" height="19" rx="9.5"/>'
        yield _draw_text(times, left + pill / 2, p.y + 19, "t m") + "</g>"
    if not p.open:
        lines = [(line, "m") for line in label.lines] + [(line, "m s") for line in p.shape.captions]
        for i, (line, style) in enumerate(lines, 1):
            yield _draw_text(line, p.x + p.width / 2, p.y + 19 + LEADING * i, style)


def _draw_text(plain: str, x: float, y: float, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape_text(plain)}</text>'


def _draw_wires(p: PlacedShape) -> Iterator[str]:
    for wire in p.wires:
        corners = "L".join(f"{x:.1f} {y:.1f}" for x, y in wire.points)
        end = "" if wire.target is None else ' marker-end="url(#arrow)"'
        yield f'<path class="w" d="M{corners}"{end}/>'


# -- title, fact sheet and legend


def _draw_heading(sheet: Sheet, room: float) -> Iterator[tuple[float, str]]:
    """Yield (y of the baseline, SVG element) for each line of title and description, at most `room` pixels wide."""
    y = 18.0
    for line in wrap_text(sheet.title, room, NAME, True):
        yield y, _draw_text(line, 0, y, "name")
        y += 28
    y -= 7
    for line in wrap_text(sheet.about, room, ABOUT):
        yield y, _draw_text(line, 0, y, "about s")
        y += 16


def _draw_sheet(sheet: Sheet, placed: PlacedShape) -> Iterator[tuple[float, str]]:
    """Yield (y of its bottom, SVG element) for the elements of the fact sheet, then for each kind in the legend."""
    y = 0.0
    for name, value in sheet.rows:
        yield y, f'<path class="rule" d="M0 {y:g}H{SHEET:g}"/>' + _draw_text(name, 0, y + 17, "about s")
        for line in wrap_text(value, SHEET - NAMES, ABOUT):
            yield y + 24, _draw_text(line, NAMES, y + 17, "about")
            y += ROW
        y += 7
    yield y, f'<path class="rule" d="M0 {y:g}H{SHEET:g}"/>'
    present = {p.shape.label.kind for p in placed.all() if p.shape.part.path}
    for i, kind in enumerate(kind for kind in MEANINGS if kind in present):
        x, at = i % 2 * SHEET / 2, y + 20 + i // 2 * 25
        swatch = f'<rect x="{x:g}" y="{at:g}" width="26" height="18" rx="5"/>'
        swatch += f'<path class="mark" transform="translate({x + 8:g} {at + 4:g})" d="{EVERY[kind].mark}"/>'
        yield at + 18, f'<g class="k-{kind}">{swatch}{_draw_text(MEANINGS[kind], x + 34, at + 13, "")}</g>'


BOLD = ".t,.name{font-family:'Inter SemiBold'}"  # the family name inside the font file
MOST = 100_000_000  # pixels; four bytes each, and twice that during compression


def render_png(picture: str, scale: float = 2.0) -> bytes:
    """Return the SVG `picture` rendered as PNG, with `scale` pixels per SVG pixel.

    Raises:
        WeftError: if resvg is not installed, or the picture would have no pixels or too many.
    """
    try:
        from resvg_py import svg_to_bytes
    except ImportError as e:
        raise WeftError(".png needs the package resvg-py: install weft[viz], or write .svg") from e
    size = re.search(r'width="(\d+)" height="(\d+)"', picture)
    assert size is not None
    wide, high = (round(int(n) * scale) for n in size.groups())
    if not 0 < wide * high <= MOST:
        raise WeftError(f"a picture of {wide:,} × {high:,} pixels cannot be drawn: choose another scale than {scale:g}")
    with contextlib.ExitStack() as files:
        fonts = [str(files.enter_context(as_file(FONT / f"inter-{weight}.ttf"))) for weight in ("400", "600")]
        # resvg does not read the fonts in the SVG's own style sheet.
        png = svg_to_bytes(
            svg_string=picture,
            zoom=scale,
            skip_system_fonts=True,
            font_files=fonts,
            sans_serif_family="Inter",
            style_sheet=BOLD,
        )
    return bytes(png)

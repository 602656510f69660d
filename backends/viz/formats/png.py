"""Pictures as PNG, rendered by resvg with the fonts that come with weft."""

from __future__ import annotations

import contextlib
import re
from importlib.resources import as_file

from weft.ir.errors import WeftError

from ..layout.font import FONT

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

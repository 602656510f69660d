"""Pictures of a source, in the format that a file's name asks for, or to be shown in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.backends.viz.formats.dot import dot
from weft.backends.viz.formats.mermaid import mermaid
from weft.backends.viz.formats.png import png
from weft.backends.viz.formats.tree import plain_tree
from weft.backends.viz.layout.scene import scene
from weft.backends.viz.model.network import Network
from weft.ir.errors import WeftError, unknown
from weft.ir.storage import whole_file

from ....model import SourceLike
from .comparing import difference
from .drawable import described, loaded, named_files
from .drawing import Drawing, Look
from .fact_sheet import fact_sheet, short_sheet

FORMATS: dict[str, Callable[[Drawing], str | bytes]] = {
    ".html": lambda drawing: drawing.page(),
    ".svg": lambda drawing: drawing.svg(),
    ".png": lambda drawing: png(drawing.svg(), drawing.look.scale),
    ".mmd": lambda drawing: mermaid(drawing.placed, drawing.sheet),
    ".dot": lambda drawing: dot(drawing.placed, drawing.sheet),
    ".txt": lambda drawing: plain_tree(drawing.placed, drawing.sheet),
}


def draw(
    source: SourceLike,
    out: str | Path,
    depth: int | None = None,
    parts: Iterable[str] = (),
    *,
    vs: SourceLike | None = None,
    more: Mapping[str, Any] | None = None,
    trust: bool = False,
    **look: Any,
) -> None:
    """Write a picture of `source` to `out`, whole or not at all, in the format that its ending names; with another
    source, `vs`, of both side by side, with marks for what is new, gone or changed in that.

    .html is a page to click through, .svg and .png the picture with a fact sheet, .mmd Mermaid for Markdown, .dot a
    graph for Graphviz, .txt a tree. `depth` levels of parts are open (None: layers), and `parts` by name; `dark` and
    `scale` (pixels of a .png for each of the picture's) are of .svg and .png. `more` is plain data for a page.
    `trust` lets the architecture file run that a folder of PyTorch says it was compiled from.

    Raises:
        WeftError: if the source cannot be read, the ending of `out` names no format, no part is called so, or `out`
            cannot be written.
    """
    out = Path(out)
    check_format(out)
    drawn = drawing(source, Look(depth, tuple(parts), **look), vs, trust)
    data = FORMATS[out.suffix](replace(drawn, more={**drawn.more, **more}) if more else drawn)
    with whole_file(out, named_files(source, vs)) as path:
        path.write_bytes(data if isinstance(data, bytes) else data.encode())


def check_format(out: Path) -> None:
    """Raise WeftError if no picture has the ending of `out`."""
    if out.suffix not in FORMATS:
        raise WeftError(unknown("format", out.suffix or out.name, FORMATS, f"write one of {', '.join(FORMATS)}"))


def drawing(source: SourceLike, look: Look | None = None, vs: SourceLike | None = None, trust: bool = False) -> Drawing:
    """Draw `source`, or `source` compared with `vs`."""
    if vs is not None:
        return difference(source, vs, look, trust=trust)
    model = loaded(source)
    network: Network = described(source if model is None else model, trust)
    sheet = short_sheet(network) if model is None else fact_sheet(model)
    return Drawing(scene(network), sheet, look or Look())

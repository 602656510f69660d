"""Pictures of a source, in the format that a file's name asks for, or to be shown in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.backends.storage import whole_file
from weft.backends.viz.formats.dot import dot
from weft.backends.viz.formats.mermaid import mermaid
from weft.backends.viz.formats.png import png
from weft.backends.viz.formats.sheet import Sheet
from weft.backends.viz.formats.svg import svg
from weft.backends.viz.formats.tree import plain_tree
from weft.backends.viz.layout.opening import opened
from weft.backends.viz.layout.positions import Placed, place
from weft.backends.viz.layout.scene import Shape, scene
from weft.backends.viz.model.network import Network
from weft.backends.viz.web.page import page
from weft.ir.errors import WeftError, unknown

from ..source.source_like import SourceLike
from .drawable import described, loaded, named_files
from .fact_sheet import fact_sheet, short_sheet


@dataclass(frozen=True)
class Look:
    """How a picture is to be: how many levels of parts are open (None: layers, and what they are in), which `parts`
    are besides, dark or light, and how many pixels a .png has for each of its own."""

    depth: int | None = None
    parts: tuple[str, ...] = ()
    dark: bool = False
    scale: float = 2.0


@dataclass(frozen=True)
class Drawing:
    """What is drawn: the shapes of a network, its facts, and how; `more` is what else a page tells, by name."""

    root: Shape
    sheet: Sheet
    look: Look = field(default_factory=Look)
    more: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def opened(self) -> set[str]:
        """The keys of the open parts."""
        return opened(self.root, self.look.depth, self.look.parts)

    @cached_property
    def placed(self) -> Placed:
        """Where everything is."""
        return place(self.root, self.opened)

    def page(self) -> str:
        """The page to click through."""
        return page(self.root, self.opened, self.more)

    def svg(self) -> str:
        """The picture to print."""
        return svg(self.root, self.opened, self.sheet, self.look.dark)


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
    made = FORMATS[out.suffix](replace(drawn, more={**drawn.more, **more}) if more else drawn)
    with whole_file(out, named_files(source, vs)) as path:
        path.write_bytes(made if isinstance(made, bytes) else made.encode())


def check_format(out: Path) -> None:
    """Raise WeftError if no picture has the ending of `out`."""
    if out.suffix not in FORMATS:
        raise WeftError(unknown("format", out.suffix or out.name, FORMATS, f"write one of {', '.join(FORMATS)}"))


def drawing(source: SourceLike, look: Look | None = None, vs: SourceLike | None = None, trust: bool = False) -> Drawing:
    """What is drawn of `source`, or of it and `vs`."""
    if vs is not None:
        from .comparing import difference

        return difference(source, vs, look, trust=trust)
    model = loaded(source)
    found: Network = described(source if model is None else model, trust)
    sheet = short_sheet(found) if model is None else fact_sheet(model)
    return Drawing(scene(found), sheet, look or Look())

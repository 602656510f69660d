"""Display of models: as a page in a notebook, as a tree in a terminal."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....model import SourceLike

if TYPE_CHECKING:
    from .drawing import Drawing


@dataclass(frozen=True, repr=False)
class Picture:
    """The result of `show`: an interactive page in a notebook, `height` pixels high; a tree elsewhere."""

    drawing: Drawing
    height: int

    def _repr_html_(self) -> str:
        title, page = (html.escape(text) for text in (self.drawing.sheet.title, self.drawing.page()))
        style = (
            f"box-sizing: border-box; width: 100%; height: {self.height}px; border: 1px solid #8886; border-radius: 8px"
        )
        return f'<iframe title="{title}" srcdoc="{page}" style="{style}" loading="lazy"></iframe>'

    def __repr__(self) -> str:
        from weft.backends.viz.formats.tree import render_plain_tree

        return render_plain_tree(self.drawing.placed_root, self.drawing.sheet).rstrip()


def show(source: SourceLike, height: int = 640, depth: int | None = None, parts: tuple[str, ...] = ()) -> Picture:
    """Return a picture of `source` (anything `load_source` accepts, an ONNX file, a compiled folder) for a notebook.

    It is `height` pixels high, with `depth` levels of open parts (None: layers), and the parts called `parts` open.
    Printed, it is a tree of the parts with their sizes and parameters.

    Raises:
        WeftError: if the source cannot be read, or a name of `parts` is unknown.
    """
    from .drawing import PictureOptions
    from .pictures import build_drawing

    return Picture(build_drawing(source, PictureOptions(depth, parts)), height)

"""Models that show themselves: as a page in a notebook, as a tree where there is only text."""

from __future__ import annotations

import html

from ....model import SourceLike


class Picture:
    """Result of `show`: an interactive page in a notebook, a tree elsewhere."""

    def __init__(self, source: SourceLike, height: int, depth: int | None, parts: tuple[str, ...]) -> None:
        from .drawing import Look
        from .pictures import drawing

        self.drawing = drawing(source, Look(depth, parts))
        self.height = height

    def _repr_html_(self) -> str:
        title, page = (html.escape(text) for text in (self.drawing.sheet.title, self.drawing.page()))
        style = (
            f"box-sizing: border-box; width: 100%; height: {self.height}px; border: 1px solid #8886; border-radius: 8px"
        )
        return f'<iframe title="{title}" srcdoc="{page}" style="{style}" loading="lazy"></iframe>'

    def __repr__(self) -> str:
        from weft.backends.viz.formats.tree import plain_tree

        return plain_tree(self.drawing.placed, self.drawing.sheet).rstrip()


def show(source: SourceLike, height: int = 640, depth: int | None = None, parts: tuple[str, ...] = ()) -> Picture:
    """A picture of `source` (whatever `load_source` takes, an ONNX file, a compiled folder) for a notebook.

    It is `height` pixels high; `depth` levels of parts are open (None: layers), and `parts` by name. Printed, it is a
    tree of the parts with their sizes and parameters.

    Raises:
        WeftError: if the source cannot be read, or no part is called so.
    """
    return Picture(source, height, depth, parts)

"""A drawing: the shapes of a network, its fact sheet, and options of the picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from weft.backends.viz.formats.style import Sheet
from weft.backends.viz.formats.svg import render_svg
from weft.backends.viz.layout.coordinates import PlacedShape, place_shapes
from weft.backends.viz.layout.scene import Shape, select_open
from weft.backends.viz.web.page import render_page


@dataclass(frozen=True)
class PictureOptions:
    """Options of a picture.

    depth: levels of open parts (None: down to layers). parts: names of further parts to open.
    dark: dark colours. scale: .png pixels per unit.
    """

    depth: int | None = None
    parts: tuple[str, ...] = ()
    dark: bool = False
    scale: float = 2.0


@dataclass(frozen=True)
class Drawing:
    """The shapes of a network, its fact sheet and picture options; `more` is additional page data by name."""

    root: Shape
    sheet: Sheet
    options: PictureOptions = field(default_factory=PictureOptions)
    more: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def open_keys(self) -> set[str]:
        """Return the keys of the open parts."""
        return select_open(self.root, self.options.depth, self.options.parts)

    @cached_property
    def placed_root(self) -> PlacedShape:
        """Return the shapes with their positions in the picture."""
        return place_shapes(self.root, self.open_keys)

    def page(self) -> str:
        """Return the interactive page, as HTML."""
        return render_page(self.root, self.open_keys, self.more, self.sheet.title)

    def svg(self) -> str:
        """Return the picture, as SVG."""
        return render_svg(self.root, self.open_keys, self.sheet, self.options.dark)

"""Objects that notebooks show. What draws them registers itself, so nothing here knows of pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_renderers: list[Callable[..., Any]] = []


def register_renderer(render: Callable[..., Any]) -> None:
    """Let `render` draw what is `Displayable`: ``render(source, **options)`` returns an object with ``_repr_html_``."""
    _renderers.append(render)


class Displayable:
    """An object that a notebook shows as its picture."""

    def show(self, height: int = 640, depth: int | None = None, parts: tuple[str, ...] = ()) -> Any:
        """Return its picture, as `weft.show` makes it: `height` in pixels, `depth` levels of parts and `parts` open."""
        return _renderers[-1](self, height=height, depth=depth, parts=parts)

    def _repr_html_(self) -> str | None:
        html: str | None = self.show()._repr_html_() if _renderers else None
        return html

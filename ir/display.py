"""Objects that notebooks display. Renderers register themselves, so this module depends on no drawing code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_renderers: list[Callable[..., Any]] = []


def register_renderer(render: Callable[..., Any]) -> None:
    """Draw `Displayable`s with `render` from now on: ``render(source, **options)`` returns the picture object."""
    _renderers.append(render)


class Displayable:
    """An object that a notebook displays as its picture."""

    def show(self, height: int = 640, depth: int | None = None, parts: tuple[str, ...] = ()) -> Any:
        """Return the picture that `weft.show` draws; the arguments are the same."""
        return _renderers[-1](self, height=height, depth=depth, parts=parts)

    def _repr_html_(self) -> str | None:
        html: str | None = self.show()._repr_html_() if _renderers else None
        return html

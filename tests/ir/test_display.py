"""Pictures in notebooks."""

from __future__ import annotations

from typing import Any

import pytest

from weft.ir import display
from weft.ir.display import Displayable, register_renderer


class Picture:
    def __init__(self, source: object, **options: Any) -> None:
        self.source, self.options = source, options

    def _repr_html_(self) -> str:
        return "<svg/>"


def test_displayable_has_no_html_without_a_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_renderers", [])
    assert Displayable()._repr_html_() is None


def test_displayable_is_drawn_by_the_last_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_renderers", [lambda source, **options: None])
    register_renderer(Picture)
    source = Displayable()
    picture = source.show(300, depth=2, parts=("q",))
    assert picture.source is source
    assert picture.options == {"height": 300, "depth": 2, "parts": ("q",)}
    assert source._repr_html_() == "<svg/>"

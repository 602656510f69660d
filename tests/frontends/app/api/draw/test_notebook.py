"""Models shown in a notebook, and printed elsewhere."""

from __future__ import annotations

import html

import pytest

from weft import MLP, Attention, Block, Decoder, WeftError
from weft.frontends.app.api.draw.notebook import show

MODEL = Decoder(11, 8, 2, Block(Attention(2), MLP(8)))


def test_notebook_shows_a_page_of_the_height_that_is_asked_for() -> None:
    cell = show(MODEL, height=123)._repr_html_()
    assert cell.startswith('<iframe title="Decoder"') and "height: 123px" in cell
    page = html.unescape(cell.partition('srcdoc="')[2].partition('" style=')[0])
    assert page.startswith("<!doctype html>") and "layers.0.attn.q" in page


def test_printed_it_is_a_tree_with_the_open_parts() -> None:
    assert "├─ layers 0-1 × 2" in repr(show(MODEL)) and "│  ├─ attn " in repr(show(MODEL))
    assert "attn " not in repr(show(MODEL, depth=0))
    assert "│  │  ├─ q " in repr(show(MODEL, parts=("attn",)))


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(WeftError, match="unknown part 'atn'"):
        repr(show(MODEL, parts=("atn",)))

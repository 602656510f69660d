"""Drawings: the open parts, the picture and the page of a network."""

from __future__ import annotations

from weft import MLP, Attention, Block, Decoder
from weft.backends.viz.formats.style import DARK, LIGHT, Sheet
from weft.backends.viz.layout.scene import build_scene
from weft.backends.viz.model.network import build_network
from weft.frontends.app.api.draw.drawing import Drawing, PictureOptions

ROOT = build_scene(build_network(Decoder(11, 8, 2, Block(Attention(2), MLP(8))).graph()))
SHEET = Sheet("tiny", "two layers", (("Width", "8"),))


def test_depth_and_parts_choose_what_is_open() -> None:
    default, closed = Drawing(ROOT, SHEET), Drawing(ROOT, SHEET, PictureOptions(depth=0))
    part = Drawing(ROOT, SHEET, PictureOptions(depth=0, parts=("attn",)))
    assert closed.open_keys < default.open_keys
    assert "layers.0.attn" in part.open_keys - closed.open_keys and "layers.0.ffn" not in part.open_keys
    assert closed.placed_root.height < default.placed_root.height


def test_picture_has_the_sheet_and_the_colours_of_its_theme() -> None:
    light, dark = Drawing(ROOT, SHEET).svg(), Drawing(ROOT, SHEET, PictureOptions(dark=True)).svg()
    assert "two layers" in light and "Width" in light
    assert f".paper{{fill:{LIGHT.paper}}}" in light and f".paper{{fill:{DARK.paper}}}" in dark


def test_page_holds_additional_data_by_name() -> None:
    assert '"prompt":{"text":"hello"}' in Drawing(ROOT, SHEET, more={"prompt": {"text": "hello"}}).page().replace(
        ": ", ":"
    )
    assert '"hello"' not in Drawing(ROOT, SHEET).page()

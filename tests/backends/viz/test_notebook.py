"""Models in notebooks: an iframe that holds its page, a tree where there is only text."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import weft
from weft import Attention, Block, Decoder, Encoder, EncoderDecoder, GatedMLP, LayerNorm, RMSNorm, WeftError

BLOCK = Block(Attention(4, 2), GatedMLP(48), RMSNorm())
DECODER = Decoder(12, 32, 3, BLOCK)
CROSSED = Block(Attention(4), GatedMLP(48), RMSNorm(), cross=weft.CrossAttention(4))
SHOWN: dict[str, Any] = {
    "Decoder": DECODER,
    "Encoder": Encoder(12, 32, 2, Block(Attention(4), GatedMLP(48), LayerNorm())),
    "EncoderDecoder": EncoderDecoder(Encoder(12, 32, 2, BLOCK), Decoder(12, 32, 2, CROSSED)),
    "Graph": DECODER.graph(name="a graph"),
    "Model": weft.load_source("gpt2"),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_models_and_graphs_have_html(kind: str) -> None:
    text = SHOWN[kind]._repr_html_()
    found = re.fullmatch(r'<iframe title="([^"]+)" srcdoc="([^"]*)" style="([^"]*)" loading="lazy"></iframe>', text)
    assert found is not None
    page = html.unescape(found[2])
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert "height: 640px" in found[3]


def test_notebook_cell_contains_the_interactive_page(visit: Callable[[str], Page]) -> None:
    cell = DECODER.show(height=500)._repr_html_()
    shown = visit(f"<!doctype html><body><div style='width: 900px'>{cell}</div></body>")
    box = shown.locator("iframe").bounding_box()
    assert box is not None and (box["width"], box["height"]) == (900, 500)
    inside = shown.frame_locator("iframe")
    layer = inside.locator('g.part[data-key="layers.0.attn"]')
    layer.click()
    expect(layer).to_have_attribute("aria-expanded", "true")
    expect(inside.locator('g.part[data-key="layers.0.attn.q"]')).to_be_visible()
    inside.locator("#theme").click()
    expect(inside.locator("html")).to_have_class("dark")
    shown.wait_for_timeout(300)  # what would be written into an address: a page in a page has none


def test_repr_of_a_picture_is_a_tree() -> None:
    text = repr(DECODER.show())
    assert text.splitlines()[0].split()[0] == "Decoder"
    assert "├─ layers 0-2 × 3" in text and "│  ├─ attn " in text and "q " not in text
    assert "│  │  ├─ q " in repr(DECODER.show(parts=("attn",)))
    assert "attn " not in repr(weft.show(DECODER, depth=0))


def test_names_are_escaped() -> None:
    graph = DECODER.graph(name='a "b" <i>')
    text = weft.show(graph)._repr_html_()
    assert text.startswith('<iframe title="a &quot;b&quot; &lt;i&gt;"')
    assert text.count('"') == 2 * 4


def test_invalid_sources_and_parts_are_refused() -> None:
    with pytest.raises(WeftError, match="a list is not a valid source"):
        weft.show([])
    with pytest.raises(WeftError, match="unknown part 'nothing'"):
        repr(DECODER.show(parts=("nothing",)))


@pytest.fixture(scope="module")
def imported() -> tuple[str | None, list[str]]:
    """The HTML of a graph in a process that has imported `weft.ir` only, then the modules that `weft.Decoder` needs."""
    code = (
        "import json, sys; from weft.ir import Graph; html = Graph()._repr_html_(); import weft; weft.Decoder; "
        "print(json.dumps([html, [m for m in sys.modules if 'weft' in m]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    html, modules = json.loads(done.stdout)
    return html, modules


def test_graph_has_no_html_without_frontends(imported: tuple[str | None, list[str]]) -> None:
    assert imported[0] is None
    assert Decoder(vocab=5, dim=4, layers=1, block=BLOCK).graph()._repr_html_() is not None  # frontends are imported


def test_models_do_not_import_pictures(imported: tuple[str | None, list[str]]) -> None:
    assert "weft.ir" in imported[1] and not [name for name in imported[1] if "viz" in name or "pictures" in name]

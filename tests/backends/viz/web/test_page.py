"""The page in a browser: the same places as in Python, parts that open and close."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page

from weft.backends.viz.layout.coordinates import place_shapes
from weft.backends.viz.layout.scene import ALL, list_default_open
from weft.backends.viz.web.page import encode_json, list_common_data, list_model_data

from ....sampling import each
from ..pages import drawn, of_preset

CORNERS = """() => { const found = {}; const walk = (p) => {
  found[p.shape.key] = [p.x, p.y, p.width, p.height, p.axis, p.wires.map((w) => w.points)]; p.inner.forEach(walk) };
  walk(root); return found }"""


@pytest.mark.parametrize(
    "preset", each(2, ["smollm2-135m", "deepseek-v3", "t5-base", "mamba-130m", "gpt3-175b", "bert-base"])
)
def test_positions_equal_those_of_python(preset: str, visit: Callable[[str], Page]) -> None:
    root = drawn(preset)
    everything = {s.key for s in root.all() if s.arrangement is not None}
    repeats = {s.key + ALL for s in root.all() if s.part.count > 1}
    shown = visit(of_preset(preset))
    for opened in (list_default_open(root), everything, everything | repeats):
        shown.evaluate("(keys) => { opened.clear(); keys.forEach((k) => opened.add(k)); draw() }", sorted(opened))
        theirs: dict[str, Any] = shown.evaluate(CORNERS)
        ours = {p.shape.key: p for p in place_shapes(root, opened).all()}
        assert theirs.keys() == ours.keys()
        for key, p in ours.items():
            *numbers, wires = theirs[key]
            assert numbers == pytest.approx([p.x, p.y, p.width, p.height, p.axis], abs=0.5), key
            for line, wire in zip(wires, p.wires, strict=True):
                assert [tuple(point) for point in line] == [pytest.approx(point, abs=0.5) for point in wire.points]


def test_click_opens_and_closes_a_part(visit: Callable[[str], Page]) -> None:
    shown = visit(of_preset("smollm2-135m"))
    part, inner = shown.locator('g[data-key="layers.0.attn"]'), shown.locator('g[data-key="layers.0.attn.q"]')
    assert part.get_attribute("aria-expanded") == "false" and inner.count() == 0
    part.click()
    assert part.get_attribute("aria-expanded") == "true" and inner.count() == 1
    part.locator("rect.bar").click()
    assert part.get_attribute("aria-expanded") == "false" and inner.count() == 0


def test_data_cannot_end_its_script_element() -> None:
    data = {"name": "</script><b>", "é": [1, None]}
    text = encode_json(data)
    assert "<" not in text and "é" in text and json.loads(text) == data


def test_page_is_one_file_with_its_model_data() -> None:
    text = of_preset("smollm2-135m")
    assert text.startswith("<!doctype html>") and "smollm2-135m</title>" in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
    assert text.count("@font-face") == 2


def test_model_data_has_panels_tokens_and_origins() -> None:
    root = drawn("smollm2-135m")
    data = list_model_data(root, {"b", "a"})
    assert (data["opened"], data["tokens"], data["root"]["key"]) == (["a", "b"], 512, "")
    assert "attention" in data["panels"]
    assert list_model_data(root.inner[0], ()).keys() == {"root", "opened"}  # a part alone has no model
    assert list_common_data()["numbers"]["tokens"] == 512

"""The page in a browser: the same places as in Python, parts that open and close."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page

from weft.backends.viz.layout.coordinates import place_shapes
from weft.backends.viz.layout.scene import ALL, list_default_open

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

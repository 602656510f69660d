"""The page in a browser: the same places as in Python, parts that open and close."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from weft.backends.viz.layout.coordinates import place_shapes
from weft.backends.viz.layout.scene import ALL, list_default_open
from weft.backends.viz.web.page import encode_json, list_common_data, list_model_data, render_gallery, restrict_rules
from weft.frontends.app.api.draw.galleries import build_card
from weft.frontends.models.presets import PRESETS

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
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="(?!data:)', text)
    assert text.count("@font-face") == 2


def test_model_data_has_panels_tokens_and_origins() -> None:
    root = drawn("smollm2-135m")
    data = list_model_data(root, {"b", "a"})
    assert (data["opened"], data["tokens"], data["root"]["key"]) == (["a", "b"], 512, "")
    assert "attention" in data["panels"]
    assert list_model_data(root.inner[0], ()).keys() == {"root", "opened"}  # a part alone has no model
    assert list_common_data()["numbers"]["tokens"] == 512


CHOSEN = ("gpt2", "smollm2-135m", "t5-base", "mixtral-8x7b", "mamba-130m", "bert-base")
Visit = Callable[[str], Page]


make_card = functools.cache(build_card)


@functools.cache
def page() -> str:
    return render_gallery([make_card(preset) for preset in CHOSEN], "Architectures")


def names(shown: Page) -> list[str]:
    return shown.locator("article h2").all_inner_texts()


def press(shown: Page, group: str, name: str) -> None:
    shown.get_by_role("group", name=group, exact=True).get_by_role("button", name=name, exact=True).click()


def test_every_model_has_a_card_with_its_facts(visit: Visit) -> None:
    shown = visit(page())
    assert names(shown) == list(CHOSEN)
    for i, preset in enumerate(CHOSEN):
        cells = shown.locator("article").nth(i).locator("dl")
        assert f"{PRESETS[preset].parameters:,}" in cells.inner_text()
    expect(shown.locator("#count")).to_have_text("6 models")


def test_pictures_are_drawn_when_they_scroll_into_view(visit: Visit) -> None:
    shown = visit(page())
    shown.set_viewport_size({"width": 400, "height": 500})
    shown.reload()
    pictures = shown.locator("figure svg")
    expect(pictures.first.locator("rect").first).to_be_attached()
    assert pictures.last.locator("rect").count() == 0
    pictures.last.scroll_into_view_if_needed()
    expect(pictures.last.locator("rect").first).to_be_attached()
    box = pictures.last.bounding_box()
    assert box is not None and box["width"] > 100 and box["height"] > 300
    assert "Multi-head attention" in (pictures.last.get_attribute("aria-label") or "")


def test_filters_combine_by_group(visit: Visit) -> None:
    shown = visit(page())
    press(shown, "Built", "experts")
    assert names(shown) == ["mixtral-8x7b"]
    press(shown, "Built", "recurrent")
    assert names(shown) == ["mixtral-8x7b", "mamba-130m"]
    press(shown, "Attention", "none")
    assert names(shown) == ["mamba-130m"]
    expect(shown.locator("#count")).to_have_text("1 of 6 models")
    press(shown, "Kind", "encoder")
    assert names(shown) == []
    shown.get_by_role("button", name="Show all").click()
    assert names(shown) == list(CHOSEN)
    assert shown.locator('nav [aria-pressed="true"]').count() == 0


def test_search_matches_names_and_facts(visit: Visit) -> None:
    shown = visit(page())
    shown.keyboard.press("/")
    shown.keyboard.type("jiang experts")
    assert names(shown) == ["mixtral-8x7b"]
    shown.keyboard.press("Escape")
    assert names(shown) == list(CHOSEN)


@pytest.mark.parametrize("by", ["parameters", "active parameters"])
def test_cards_are_sorted_by_a_number(by: str, visit: Visit) -> None:
    shown = visit(page())
    shown.get_by_label("Sort by").select_option(by)
    sizes = {c.sheet.title: c.numbers[by] for c in map(make_card, CHOSEN)}
    assert names(shown) == sorted(CHOSEN, key=sizes.__getitem__)
    shown.get_by_label("Sort by").select_option("context")
    assert names(shown)[-1] == "mamba-130m"  # what has none comes last


def test_keys_move_between_cards_and_open_one(visit: Visit) -> None:
    shown = visit(page())
    focused = "document.activeElement.closest('article')?.dataset.card"
    across = shown.evaluate("across()")
    for key, at in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowDown", 1 + across), ("ArrowUp", 1), ("ArrowLeft", 0)):
        shown.keyboard.press(key)
        assert shown.evaluate(focused) == CHOSEN[at]
    shown.keyboard.press("Enter")
    expect(shown.locator("#viewer")).to_be_visible()
    expect(shown).to_have_url(re.compile("#gpt2$"))
    inside = shown.frame_locator("iframe")
    expect(inside.locator("h1")).to_have_text("gpt2")
    layer = inside.locator('g.part[data-key="layers.0.attn"]')
    expect(layer).to_have_attribute("aria-expanded", "false")
    layer.click()
    expect(layer).to_have_attribute("aria-expanded", "true")
    shown.get_by_role("button", name="Close", exact=True).click()
    expect(shown.locator("#viewer")).to_be_hidden()
    expect(shown).not_to_have_url(re.compile("#"))  # which the browser tells a moment later
    assert shown.evaluate(focused) == "gpt2"


def test_address_opens_a_model(visit: Visit) -> None:
    shown = visit(page())
    shown.evaluate("location.hash = 'mamba-130m'")
    expect(shown.frame_locator("iframe").locator("h1")).to_have_text("mamba-130m")
    shown.evaluate("location.hash = 'nothing'")
    expect(shown.locator("#viewer")).to_be_hidden()


def test_dark_theme_applies_to_the_page_of_a_model(visit: Visit) -> None:
    shown = visit(page())
    paper = "getComputedStyle(document.body).backgroundColor"
    light = shown.evaluate(paper)
    shown.keyboard.press("d")
    dark = shown.evaluate(paper)
    assert light == "rgb(255, 255, 255)" and dark == "rgb(20, 23, 28)"
    shown.locator("figure a").first.click()
    expect(shown.frame_locator("iframe").locator("body")).to_have_css("background-color", dark)


def test_large_pictures_have_their_own_size(visit: Visit) -> None:
    shown = visit(page())
    picture = shown.locator("figure svg").nth(1)
    expect(picture.locator("rect").first).to_be_attached()
    view = [float(n) for n in (picture.get_attribute("viewBox") or "").split()]
    before = picture.bounding_box()
    shown.keyboard.press("l")
    after = picture.bounding_box()
    assert before is not None and after is not None
    assert after["height"] > 1.2 * before["height"]
    assert after["height"] / after["width"] == pytest.approx(view[3] / view[2], rel=0.02)
    expect(shown.get_by_role("button", name="Large")).to_have_attribute("aria-pressed", "true")


def test_gallery_of_all_presets_is_small() -> None:
    whole = len(page())
    alone = len(render_gallery([make_card(CHOSEN[0])], "one"))
    assert alone < 350_000
    assert whole + (len(PRESETS) - len(CHOSEN)) * (whole - alone) / (len(CHOSEN) - 1) < 2_500_000
    assert page().count("@font-face") == 2


def test_restrict_rules_prefixes_every_selector() -> None:
    assert restrict_rules(".a", "b,c>d{x:y} .e{z:w}") == ".a b,.a c>d{x:y}.a .e{z:w}"
    assert not re.search(r"(^|\})\s*(?!\.picture)[^{}]+\{", restrict_rules(".picture", "text{a:b}\n.t{c:d} .m{e:f}"))

"""The gallery in Chromium: cards, filters, order, search, keys, and the page of a model in it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from weft.backends.viz.web.gallery import render_gallery, restrict_rules
from weft.frontends.app.api.draw.galleries import build_card
from weft.frontends.models.presets import PRESETS

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

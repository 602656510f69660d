"""Panels in Chromium: which there are, what they draw and say, that their text can be read, and what a click does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page

from weft import Attention, Block, Decoder, MoE, RMSNorm, RoPE, load_source
from weft.backends.viz.layout.scene import build_scene
from weft.backends.viz.model.network import build_network
from weft.backends.viz.panels import prompts
from weft.backends.viz.web.page import render_page
from weft.frontends.app.api.inspect.counting import inspect

from ....sampling import each
from ..pages import model_of, of_preset

Visit = Callable[[str], Page]
IDS = [5, 17, 3, 8, 42, 17, 60, 2]
TABS = {
    "mistral-7b": ["text", "attention", "positions", "caches", "sizes"],
    "deepseek-v3": ["text", "attention", "positions", "caches", "experts", "sizes"],
    "mamba-130m": ["text", "caches", "sizes"],
    "t5-base": ["text", "attention", "caches", "sizes"],
}
TEXTS = """() => [...document.querySelectorAll('#about svg.chart text, #about svg.treemap text')].map((t) => {
  const box = t.getBoundingClientRect(), chart = t.closest('svg'), svg = chart.getBoundingClientRect();
  const scale = svg.width / chart.viewBox.baseVal.width;
  return { said: t.textContent, size: parseFloat(getComputedStyle(t).fontSize) * scale,
           box: [box.left, box.top, box.right, box.bottom], svg: [svg.left, svg.top, svg.right, svg.bottom] };
})"""


def with_prompt() -> str:
    """The page of a little model with experts and a window, and of what it does with eight tokens."""
    attn, ffn = Attention(4, 2, rope=RoPE(), window=5, sinks=True), MoE(6, 16, 2)
    graph = load_source(Decoder(70, 32, [Block(attn, ffn, RMSNorm())] * 2, context=64)).graph
    told = prompts.run_prompt(graph, IDS, lambda ids: "".join(f" t{i}" for i in ids), lambda done, count: None)
    return render_page(build_scene(build_network(graph)), {""}, {"prompt": {"text": "", **told}})


def show(shown: Page, tab: str) -> None:
    shown.evaluate("(id) => showTab(id)", tab)


@pytest.mark.parametrize("preset", each(2, TABS, 1))
def test_tabs_are_those_of_the_model(visit: Visit, preset: str) -> None:
    shown = visit(of_preset(preset))
    assert shown.evaluate("[...tabs.keys()]") == TABS[preset]
    for tab in TABS[preset]:
        shown.locator("#tabs button").nth(TABS[preset].index(tab)).click()
        assert shown.locator("#about").inner_text().strip()
        assert shown.locator("#tabs button[aria-pressed=true]").count() == 1


@pytest.mark.parametrize(("preset", "wide"), each(3, itertools.product(("mistral-7b", "deepseek-v3"), (1400, 480))))
def test_chart_text_is_legible(visit: Visit, preset: str, wide: int) -> None:
    shown = visit(of_preset(preset))
    shown.set_viewport_size({"width": wide, "height": 900})
    for tab in TABS[preset][1:]:
        show(shown, tab)
        texts: list[dict[str, Any]] = shown.evaluate(TEXTS)
        assert tab == "experts" or texts or tab == "attention"
        assert all(t["size"] >= 11 for t in texts)
        for i, a in enumerate(texts):
            left, top, right, bottom = a["box"]
            assert a["svg"][0] - 1 <= left and right <= a["svg"][2] + 1, (tab, a["said"])
            for b in texts[i + 1 :]:
                beside = b["box"][2] <= left + 1 or right <= b["box"][0] + 1
                over = b["box"][3] <= top + 3 or bottom <= b["box"][1] + 3  # boxes of letters have room above them
                assert beside or over, (tab, a["said"], b["said"])


def test_mask_states_visible_tokens_under_the_pointer(visit: Visit) -> None:
    shown = visit(of_preset("mistral-7b"))
    show(shown, "attention")
    grid = shown.locator("#about svg.squares").first
    grid.hover(position={"x": 11 * 2 + 5, "y": 11 * 12 + 5})
    assert shown.locator("#about output").first.inner_text() == "token 12 does not see token 2"
    grid.hover(position={"x": 11 * 9 + 5, "y": 11 * 12 + 5})
    assert shown.locator("#about output").first.inner_text() == "token 12 sees token 9"
    assert "125–12" in str(shown.locator(".masks table").text_content())  # row 12 of the table


def test_rolling_cache_shows_the_slots_after_a_token(visit: Visit) -> None:
    shown = visit(of_preset("mistral-7b"))
    show(shown, "attention")
    slots = shown.locator("#about .slots")
    assert slots.inner_text().split() == ["0", *["–"] * 7]
    shown.locator("#about .choices input").first.fill("10")
    assert slots.inner_text().split() == ["8", "9", "10", "3", "4", "5", "6", "7"]
    assert slots.get_attribute("aria-label") == "Slots after token 10: 8, 9, 10, 3, 4, 5, 6, 7"


def test_cache_equals_weft_inspect(visit: Visit) -> None:
    shown = visit(of_preset("mistral-7b"))
    shown.fill("#tokens", "32768")
    shown.press("#tokens", "Enter")
    shown.select_option("#dtype", "f32")
    show(shown, "caches")
    found = shown.locator("#about [data-number=cache]").get_attribute("data-exact")
    at_context = inspect(model_of("mistral-7b")).json()["cache_at_context_bytes"]
    assert int(str(found)) == at_context["f32"]
    shown.select_option("#dtype", "f16")  # the page follows
    assert shown.locator("#about [data-number=cache]").get_attribute("data-exact") == str(at_context["f16"])


def test_chart_values_are_shown_under_the_pointer_and_in_a_table(visit: Visit) -> None:
    shown = visit(of_preset("llama3.1-8b"))
    show(shown, "caches")
    box = shown.locator("#about svg.chart").bounding_box()
    assert box is not None
    shown.mouse.move(box["x"] + 64, box["y"] + 150)
    assert shown.locator("#about figure output").inner_text().startswith("128: this model 16 MiB · multi-head 64 MiB")
    rows = shown.locator("#about figure details table tbody tr")
    assert rows.first.locator("td").first.text_content() == "16 MiB"
    assert rows.last.locator("th").text_content() == "128k"


def test_treemap_areas_are_proportional_and_select_the_part(visit: Visit) -> None:
    shown = visit(of_preset("deepseek-v3"))
    show(shown, "sizes")
    tiles = shown.locator("#about .treemap g")
    areas = {
        str(g.get_attribute("data-key")): g.locator("rect").bounding_box() or {"width": 0.0, "height": 0.0}
        for g in tiles.all()
    }
    assert {"layers.3.ffn", "layers.3.attn", "embed", "lm_head"} <= areas.keys()
    whole = inspect(model_of("deepseek-v3")).parameters
    ffn = 58 * 11_320_164_352 / whole  # a layer's experts, its shared expert and its router
    total = sum((b["width"] + 2) * (b["height"] + 2) for b in areas.values())
    largest = areas["layers.3.ffn"]
    assert (largest["width"] + 2) * (largest["height"] + 2) / total == pytest.approx(ffn, abs=0.005)
    tiles.first.focus()
    shown.keyboard.press("Enter")
    assert shown.evaluate("chosen") == "layers.3.ffn"
    assert shown.locator("#subject").inner_text() == "Mixture of experts"


def test_treemap_of_cache_sizes(visit: Visit) -> None:
    shown = visit(of_preset("mistral-7b"))
    show(shown, "sizes")
    shown.get_by_role("button", name="cache", exact=True).click()
    assert shown.locator("#about .treemap g").count() == 1
    assert "64 MiB cache in all, for 512 tokens in f16" in shown.locator("#about").inner_text()


def test_expert_panel_describes_routing_and_idle_parameters(visit: Visit) -> None:
    shown = visit(of_preset("mixtral-8x7b"))
    show(shown, "experts")
    said = shown.locator("#about").inner_text()
    assert (
        "Each token is routed to 2 of 8 experts" in said
        and "45.1 G parameters" in said
        and "33.8 G of them, 75 %" in said
    )
    before = shown.locator("#about svg.squares").get_attribute("aria-label")
    shown.locator("#about .choices input").fill("3")
    assert shown.locator("#about svg.squares").get_attribute("aria-label") != before


def test_prompt_panel_shows_weights_predictions_and_loads(visit: Visit) -> None:
    shown = visit(with_prompt())
    show(shown, "prompt")
    weights = "(q, k, h) => weightsOf(PROMPT.layers[0])(h, q, k)"
    rows = [shown.evaluate(f"[0,1,2,3,4,5,6,7].map((k) => ({weights})(7, k, {h}))") for h in (0, 3, -1)]
    assert all(row[:3] == [0, 0, 0] and all(w > 0 for w in row[3:]) for row in rows)  # a window of 5
    assert all(sum(row) < 1 for row in rows)  # the sinks take some
    heads = shown.locator("#about .heads button")
    assert heads.count() == 6  # four heads, their mean, and the roll-out
    heads.nth(3).click()
    assert heads.nth(3).get_attribute("aria-pressed") == "true" and shown.evaluate("look.head") == 1
    shown.locator("#about .tokens button").nth(4).click()
    said = shown.locator("#about").inner_text()
    assert 'What is expected after " t42"' in said and 'What came, " t17"' in said and "Load of experts" in said
    assert shown.locator("#about .likely tr").count() == 5
    assert shown.evaluate("PROMPT.experts.map((l) => l.counts.reduce((a, b) => a + b))") == [16, 16]
    shown.locator("#about .choices input").first.fill("1")
    assert shown.evaluate("look.layer") == 1
    shown.locator("#about .heads button").nth(3).focus()
    shown.keyboard.press("Enter")
    assert shown.evaluate("document.activeElement.title") == "head 1"  # the page is made anew, the keyboard stays
    shown.evaluate("setTheme(true)")


def test_rollout_is_the_product_of_mean_weights_and_the_residual_stream(visit: Visit) -> None:
    shown, n = visit(with_prompt()), 8
    matrix = "(l, h) => [...Array(64).keys()].map((i) => weightsOf(PROMPT.layers[l])(h, Math.floor(i / 8), i % 8))"
    want = np.eye(n)
    for layer in (0, 1):
        mean = np.array(shown.evaluate(f"({matrix})({layer}, -1)")).reshape(n, n)
        mixed = (mean + np.eye(n)) / 2
        want = mixed / mixed.sum(1, keepdims=True) @ want
        np.testing.assert_allclose(np.array(shown.evaluate(f"({matrix})({layer}, -2)")).reshape(n, n), want, atol=1e-12)


def test_address_keeps_the_open_panel(visit: Visit) -> None:
    shown = visit(of_preset("mistral-7b"))
    show(shown, "caches")
    shown.wait_for_function("location.hash.includes('tab=caches')")
    shown.reload()
    assert shown.locator("#subject").inner_text() == "Cache"


def test_open_panel_keeps_the_picture_centred(visit: Visit) -> None:
    """Beside a wide panel the middle of the picture is in the middle of the stage still; then it goes back."""
    shown = visit(of_preset("mistral-7b"))
    middle = "(picture.clientWidth / 2 - at.x) / at.k"
    before, wide = shown.evaluate(middle), shown.evaluate("picture.clientWidth")
    show(shown, "caches")
    assert shown.evaluate("picture.clientWidth") < wide - 400
    assert shown.evaluate(middle) == pytest.approx(before)
    shown.keyboard.press("Escape")
    assert shown.evaluate("picture.clientWidth") == wide and shown.evaluate(middle) == pytest.approx(before)

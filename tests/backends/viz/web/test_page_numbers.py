"""Numbers of the page are those of `weft inspect --json`, whatever its reader chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page

from weft.backends.viz.model.work import DEVICES
from weft.frontends.app.api.inspect.counting import compute_part_costs

from ....sampling import each
from ..pages import address, model_of, of_preset

Visit = Callable[[str], Page]
NAMES = ("parameters", "flops", "read", "written", "step_flops", "step_read", "step_written", "cache", "state")


def told(preset: str, tokens: int, item: int) -> dict[str, dict[str, Any]]:
    """Return the numbers of `weft inspect`, part by part."""
    return {c.path: dataclasses.asdict(c) for c in compute_part_costs(model_of(preset).graph, tokens, item)}


def computed(shown: Page) -> dict[str, dict[str, int]]:
    """Return the numbers that the page's scripts compute for every part, as exact integers."""
    found = shown.evaluate(
        """() => [...index().keys()].map((key) => [key,
             Object.fromEntries(Object.entries(numbersOf(shapeAt(key))).map(([k, v]) => [k, String(v)]))])"""
    )
    return {key: {name: int(value) for name, value in numbers.items()} for key, numbers in found}


@pytest.mark.parametrize(
    ("preset", "tokens", "dtype"),
    each(
        2,
        [
            ("deepseek-v3", 100_000, "f32"),  # FLOPs beyond what a float holds exactly
            ("smollm2-135m", 512, "f16"),
            ("bert-base", 512, "f16"),
            ("gpt3-175b", 2048, "bf16"),
            ("mamba-130m", 1, "f32"),
            ("t5-base", 77, "f16"),
        ],
    ),
)
def test_page_totals_equal_weft_inspect(visit: Visit, preset: str, tokens: int, dtype: str) -> None:
    shown = visit(of_preset(preset))
    shown.fill("#tokens", str(tokens))
    shown.press("#tokens", "Enter")
    shown.select_option("#dtype", dtype)
    found = computed(shown)
    expected = told(preset, tokens, 4 if dtype == "f32" else 2)
    assert len(expected) > 7
    for path, cost in expected.items():
        assert found[path] == {name: cost[name] or 0 for name in NAMES}, path
    assert preset != "deepseek-v3" or expected[""]["flops"] > 2**53


def test_panel_shows_costs_of_the_selected_part(visit: Visit) -> None:
    shown = visit(of_preset("mistral-7b"))
    expected = told("mistral-7b", 512, 2)
    for key in ("layers.0-31", "layers.0.attn", "layers.0.ffn", "lm_head", "layers.0.attn_residual"):
        shown.evaluate("(key) => void go(key)", key)
        cells = shown.locator("#about [data-number]").all()
        found = {str(c.get_attribute("data-number")): int(str(c.get_attribute("data-exact"))) for c in cells}
        assert found == {name: n for name, n in expected[key].items() if name in found}
        assert {"flops", "step_read"} <= found.keys()
    attn = shown.evaluate("(key) => { go(key); return document.getElementById('about').innerText }", "layers.0.attn")
    assert "41,943,040 parameters, 0.579 % of the model" in attn
    assert "47.3 G" in attn and "KV cache of the text: 2 MiB" in attn


def test_roofline_states_compute_or_memory_bound(visit: Visit) -> None:
    """512 tokens through a product are bound by computing on an H100, one token by memory; on a slow processor too."""
    shown = visit(of_preset("mistral-7b"))
    shown.evaluate("void go('layers.0.ffn')")
    side = (
        "[...document.querySelectorAll('table.numbers tr')].find((r) => r.innerText.startsWith('bound by')).innerText"
    )
    assert shown.evaluate(side).split()[-2:] == ["compute", "memory"]
    ffn = told("mistral-7b", 512, 2)["layers.0.ffn"]
    for device in DEVICES:
        shown.select_option("#device", device.name)
        at = shown.evaluate(
            "roofline(numbersOf(shapeAt('layers.0.ffn')).flops, numbersOf(shapeAt('layers.0.ffn')).read)"
        )
        seconds = max(ffn["flops"] / device.half, ffn["read"] / device.memory)
        assert at["seconds"] == pytest.approx(seconds)
        assert at["side"] == ("compute" if ffn["flops"] / ffn["read"] > device.half / device.memory else "memory")
    shown.fill("#tokens", "1")
    shown.press("#tokens", "Enter")
    assert shown.evaluate(side).split()[-2:] == ["memory", "memory"]


def test_address_keeps_the_chosen_scale(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    shown.fill("#tokens", "2000")
    shown.press("#tokens", "Enter")
    shown.select_option("#device", "A100")
    assert "tokens=2000" in address(shown)
    shown.reload()
    assert shown.evaluate("[scale.tokens, scale.dtype, scale.device]") == [2000, "f16", "A100"]
    assert shown.locator("#tokens").input_value() == "2000"
    shown.fill("#tokens", "-3")
    shown.press("#tokens", "Enter")
    assert shown.locator("#tokens").input_value() == "2000"  # what is no length is not taken


def test_encoder_page_has_no_decode_step(visit: Visit) -> None:
    shown = visit(of_preset("bert-base"))
    shown.evaluate("void go('layers.0.attn')")
    text = shown.locator("#about").inner_text()
    assert "512 tokens" in text and "one more token" not in text
    assert shown.locator("#tabs").inner_text().split() == ["Outline", "Attention", "Sizes"]

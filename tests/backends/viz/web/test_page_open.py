"""Opening and closing in the page: parts, repeats, everything; and that the address keeps it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from weft.backends.viz.layout.scene import list_default_open
from weft.backends.viz.web.page import render_page

from ..pages import address, box, drawn, of_preset, part

STROKE = 1.5  # pixels by which the border of what is chosen is wider
Visit = Callable[[str], Page]


@pytest.mark.parametrize("where", [0.05, 0.5, 0.95])
def test_opened_part_stays_under_the_pointer(visit: Visit, where: float) -> None:
    shown = visit(of_preset("smollm2-135m"))
    before = box(shown, "layers.0.attn")
    x, y = before["x"] + where * before["width"], before["y"] + 12
    for _ in range(2):  # opens, then closes
        shown.mouse.click(x, y)
        now = box(shown, "layers.0.attn")
        assert now["y"] == pytest.approx(before["y"], abs=STROKE)
        assert now["x"] <= x <= now["x"] + now["width"]
    assert part(shown, "layers.0.attn").get_attribute("aria-expanded") == "false"
    assert now["width"] == pytest.approx(before["width"], abs=2 * STROKE)


def test_only_the_bar_of_an_open_part_closes_it(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    around = box(shown, "layers.0-29")
    shown.mouse.click(around["x"] + 6, around["y"] + around["height"] / 2)
    assert part(shown, "layers.0-29").get_attribute("aria-expanded") == "true"
    assert "chosen" in str(part(shown, "layers.0-29").get_attribute("class"))
    shown.mouse.click(around["x"] + 6, around["y"] + 10)
    assert part(shown, "layers.0-29").get_attribute("aria-expanded") == "false"


def test_a_repeat_unrolls_and_folds(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    times = part(shown, "layers.0-29").locator("g.times")
    at = times.bounding_box()
    assert at is not None and times.text_content() == "× 30"
    times.click()
    keys = shown.evaluate("[...spots.keys()].filter((k) => /^layers[.]\\d+$/.test(k))")
    assert keys == [f"layers.{i}" for i in range(30)]
    assert times.bounding_box() == {k: pytest.approx(v, abs=0.5) for k, v in at.items()}  # under the pointer still
    times.click()
    assert part(shown, "layers.1").count() == 0 and part(shown, "layers.0.attn").count() == 1


def test_unrolled_layer_shows_names_of_its_own(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    assert shown.evaluate("go('layers.17.attn.q')")
    panel = shown.locator("#about").inner_text()
    assert "layers.17.attn_norm" in panel and "layers.17.attn.q.weight" in panel and "layers.0" not in panel
    shown.evaluate("go('layers.17.attn_norm')")
    assert "layers.16.ffn_residual" in shown.locator("#about").inner_text()


def test_buttons_open_and_close_all_parts(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    closed = "[...spots.values()].filter((p) => p.shape.box && !p.open).length"
    shown.click("#parts")
    assert shown.evaluate(closed) == 0 and shown.evaluate("spots.has('layers.0.ffn.down')")
    shown.click("#every")
    assert shown.evaluate(closed) == 0 and shown.evaluate("spots.has('layers.29.ffn.down')")
    shown.click("#none")
    assert shown.evaluate("[...spots.keys()].length") == 1 + len(shown.evaluate("DATA.root.inner"))


def test_opening_too_many_parts_is_refused(visit: Visit) -> None:
    root = drawn("smollm2-135m")
    many = 8 + 30 * (
        1 + 6 + 7 + 4
    )  # the picture, seven parts of it; layers: the layer, six parts, those of two of them
    shown = visit(render_page(root, list_default_open(root), {"most": many - 1}))
    shown.click("#every")
    assert f"{many} parts; at most {many - 1} are drawn" in shown.locator("#said").inner_text()
    assert shown.evaluate("spots.size") < 30
    part(shown, "layers.0-29").locator("g.times").click()  # without what is in the layers it is few enough
    assert shown.evaluate("spots.has('layers.29')")
    shown = visit(render_page(root, list_default_open(root), {"most": many}))
    shown.click("#every")
    assert shown.evaluate("spots.size") == many


def test_reload_keeps_open_parts_and_theme(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    part(shown, "layers.0.attn").click()
    part(shown, "layers.0.attn.q").click()
    shown.click("#theme")
    keys, first = shown.evaluate("[...opened].sort()"), address(shown)
    assert "layers.0.attn" in keys and "#" in first
    shown.reload()
    assert shown.evaluate("[...opened].sort()") == keys
    assert shown.evaluate("chosen") == "layers.0.attn.q" and shown.evaluate("dark()")
    shown.click("#none")
    assert len(address(shown)) < len(first) + 60  # not a list of all that is closed
    shown.reload()
    assert shown.evaluate("[...opened]") == [""]


def test_address_with_unknown_part_is_reported(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    shown.evaluate("location.hash = '#at=layers.99.attn&open=nothing&as=all'")
    shown.wait_for_function("document.getElementById('said').textContent")
    assert "no part called layers.99.attn" in shown.locator("#said").inner_text()
    assert part(shown, "layers.0.attn").count() == 1

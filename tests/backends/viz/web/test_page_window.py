"""The page as a window: speed and size, zoom and pan, light and dark, paper, small screens, lines under the pointer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from ..pages import address, box, of_preset, part

Visit = Callable[[str], Page]
FRAMES = """() => new Promise((done) => {
  const times = [];
  const step = (t) => {
    times.push(t);
    pan(0, -40);
    if (times.length < 25) return requestAnimationFrame(step);
    const gaps = times.slice(1).map((v, i) => v - times[i]).sort((a, b) => a - b);
    done(gaps[gaps.length >> 1]);
  };
  requestAnimationFrame(step) })"""


@pytest.mark.parametrize("preset", ["llama3.1-405b", "deepseek-v3"])
def test_pages_of_large_models_are_small_and_load_quickly(visit: Visit, preset: str) -> None:
    text = of_preset(preset)
    shown = visit(text)
    took = shown.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    print(f"{preset}: {len(text.encode()) / 1e6:.3f} MB, {took:.0f} ms")
    assert len(text.encode()) < 1.5e6
    assert took < 1000
    assert shown.locator("g.part").count() > 10


@pytest.mark.long
def test_all_layers_of_deepseek_pan_at_thirty_frames(visit: Visit) -> None:
    shown = visit(of_preset("deepseek-v3"))
    shown.click("#every")
    assert shown.evaluate("spots.size") > 1500
    for scale in (1, 0.5, 0.1, 0.03):
        shown.evaluate("(k) => { Object.assign(at, { k, x: 100, y: -root.height * k / 3 }); apply() }", scale)
        drawn, took = shown.evaluate("elements.size"), shown.evaluate(FRAMES)
        print(f"at {scale}: {drawn} drawn, {took:.1f} ms a frame")
        assert took < 1000 / 30
        if scale >= 0.5:
            assert drawn < 400  # of 1,900 parts and as many lines


def test_parts_are_drawn_when_they_scroll_into_view(visit: Visit) -> None:
    shown = visit(of_preset("deepseek-v3"))
    shown.click("#every")
    assert part(shown, "layers.60.attn.o").count() == 0
    shown.evaluate("go('layers.60.attn.o')")
    expect(part(shown, "layers.60.attn.o")).to_be_visible()
    assert part(shown, "layers.0.attn.o").count() == 0
    shown.evaluate("home()")
    expect(part(shown, "input_ids")).to_be_visible()


def test_first_view_shows_the_top_at_full_size(visit: Visit) -> None:
    shown = visit(of_preset("deepseek-v3"))
    sizes = shown.evaluate("[...view.querySelectorAll('text')].map((t) => parseFloat(getComputedStyle(t).fontSize))")
    assert shown.evaluate("at.k") == 1 and min(sizes) >= 11
    first, stage = box(shown, "input_ids"), shown.locator("#picture").bounding_box()
    assert stage is not None and 10 <= first["y"] - stage["y"] <= 40
    assert shown.evaluate("at.x + root.width / 2") == pytest.approx(stage["width"] / 2, abs=1)


def settle(shown: Page) -> None:
    """Wait until the page has painted what events before this call changed, however long that takes."""
    shown.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_the_wheel_pans_and_zooms_at_the_pointer(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    before = box(shown, "embed")
    shown.mouse.move(before["x"] + 20, before["y"] + 30)
    shown.mouse.wheel(0, 50)
    settle(shown)
    assert box(shown, "embed")["y"] == pytest.approx(before["y"] - 50, abs=1)
    shown.mouse.wheel(0, -50)
    shown.keyboard.down("Control")
    shown.mouse.wheel(0, -120)
    shown.keyboard.up("Control")
    settle(shown)
    now, k = box(shown, "embed"), shown.evaluate("at.k")
    assert k > 1.2
    assert now["x"] + 20 * k == pytest.approx(before["x"] + 20, abs=2)
    assert now["y"] + 30 * k == pytest.approx(before["y"] + 30, abs=2)


def test_pinch_zooms_at_the_fingers(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    before, fingers = box(shown, "layers.0.attn"), shown.context.new_cdp_session(shown)
    x, y = before["x"] + 40, before["y"] + 30

    def touch(kind: str, *apart: float) -> None:
        points = [{"x": x + side * a, "y": y, "id": i} for a in apart for i, side in enumerate((-1, 1))]
        fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 30)
    for apart in (36, 42, 48, 54, 60):
        touch("touchMove", apart)
    touch("touchEnd")
    k, now = shown.evaluate("at.k"), box(shown, "layers.0.attn")
    assert k == pytest.approx(2, abs=0.1)
    assert now["x"] + 40 * k == pytest.approx(x, abs=4) and now["y"] + 30 * k == pytest.approx(y, abs=4)
    assert part(shown, "layers.0.attn").get_attribute("aria-expanded") == "false"


def test_a_drag_pans_and_opens_nothing(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    before = box(shown, "layers.0.attn")
    shown.mouse.move(before["x"] + 20, before["y"] + 20)
    shown.mouse.down()
    shown.mouse.move(before["x"] - 60, before["y"] + 90, steps=4)
    shown.mouse.up()
    now = box(shown, "layers.0.attn")
    assert (now["x"] - before["x"], now["y"] - before["y"]) == pytest.approx((-80, 70), abs=1)
    assert part(shown, "layers.0.attn").get_attribute("aria-expanded") == "false"


def test_buttons_zoom_and_fit(visit: Visit) -> None:
    shown = visit(of_preset("deepseek-v3"))
    shown.click("#in")
    assert shown.evaluate("at.k") == pytest.approx(1.25)
    shown.click("#fit")
    stage = shown.locator("#picture").bounding_box()
    assert stage is not None
    for key in ("input_ids", "out.logits"):
        assert stage["y"] <= box(shown, key)["y"] <= stage["y"] + stage["height"]
    shown.click("#home")
    assert shown.evaluate("at.k") == 1


def test_click_on_the_map_moves_the_view(visit: Visit) -> None:
    shown = visit(of_preset("deepseek-v3"))
    shown.click("#parts")
    shown.evaluate("home()")
    found = shown.locator("#map canvas").bounding_box()
    assert found is not None
    shown.mouse.click(found["x"] + found["width"] / 2, found["y"] + found["height"] - 2)
    expect(part(shown, "out.logits")).to_be_visible()


def test_light_and_dark(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    paper = "getComputedStyle(document.body).backgroundColor"
    fill = "getComputedStyle(view.querySelector('[data-kind=attention] > rect')).fill"
    light = shown.evaluate(paper), shown.evaluate(fill)
    shown.emulate_media(color_scheme="dark")
    shown.wait_for_function("dark()")
    dark = shown.evaluate(paper), shown.evaluate(fill)
    assert light[0] != dark[0] and light[1] != dark[1]
    shown.click("#theme")  # what is asked for is stronger than the system
    assert (shown.evaluate(paper), shown.evaluate(fill)) == light
    assert "theme=light" in address(shown)
    shown.keyboard.press("d")
    assert (shown.evaluate(paper), shown.evaluate(fill)) == dark


def test_print_shows_the_full_picture_in_light(visit: Visit) -> None:
    shown = visit(of_preset("deepseek-v3"))
    shown.click("#theme")
    shown.click("#parts")
    few = shown.locator("g.part").count()
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    shown.emulate_media(media="print")
    assert shown.locator("g.part").count() == shown.evaluate("spots.size") - 1 > few
    assert not shown.evaluate("dark()")
    expect(shown.locator("header").first).to_be_hidden()
    shown.emulate_media(media="screen")
    shown.evaluate("dispatchEvent(new Event('afterprint'))")
    assert shown.evaluate("dark()") and shown.locator("g.part").count() == few


def test_small_screen_has_the_panel_below(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    shown.set_viewport_size({"width": 400, "height": 780})
    shown.evaluate("choose('embed')")
    panel, stage = shown.locator("#panel").bounding_box(), shown.locator("#stage").bounding_box()
    assert panel is not None and stage is not None
    assert panel["y"] >= stage["y"] + stage["height"] - 1 and panel["width"] == 400
    assert shown.evaluate("document.documentElement.scrollWidth") == 400


def test_lines_of_a_hovered_part_are_highlighted_with_values(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    part(shown, "layers.0.attn").hover()
    assert shown.locator("path.hot").count() == 2  # into it, out of it
    upper, lower = box(shown, "layers.0.attn_norm"), box(shown, "layers.0.attn")
    shown.mouse.move(upper["x"] + upper["width"] / 2 + 3, (upper["y"] + upper["height"] + lower["y"]) / 2)
    expect(shown.locator("#tip")).to_contain_text("layers.0.attn_norm")
    expect(shown.locator("#tip")).to_contain_text("f32[batch, seq, 576]")
    assert shown.locator("path.hot").count() == 1


def test_legend_lists_the_kinds_that_occur(visit: Visit) -> None:
    shown = visit(of_preset("mamba-130m"))
    names = {b.inner_text() for b in shown.locator("#legend button").all()}
    assert "recurrence" in names and not names & {"attention", "experts"}
    shown.locator("#legend button", has_text="norm").hover()
    dim = "(kind) => +getComputedStyle(view.querySelector(`[data-kind=${kind}]`)).opacity"
    assert shown.evaluate(dim, "norm") == 1 and shown.evaluate(dim, "recurrence") < 0.5


def test_panel_links_to_the_producer_of_a_value(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    part(shown, "layers.0.attn").click()
    part(shown, "layers.0.attn.attention").click()
    about = shown.locator("#about")
    for told in ("heads", "9", "kv_heads", "3", "causal", "f32[batch, seq, 192]"):
        expect(about).to_contain_text(told)
    about.get_by_role("link", name="layers.0.attn.k_rope").click()
    assert shown.locator("#subject").inner_text() == "RoPE"
    about.get_by_role("link", name="layers.0.attn.k", exact=True).click()
    expect(about).to_contain_text("layers.0.attn.k.weight")
    expect(about.locator("pre")).to_contain_text("std=0.02")
    shown.evaluate("go('out.logits')")
    about.get_by_role("link", name="lm_head").click()
    assert shown.evaluate("chosen") == "lm_head"
    shown.click("#close")
    expect(shown.locator("#panel")).to_be_hidden()

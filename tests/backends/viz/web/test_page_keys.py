"""The page without a mouse, and for those who do not see it."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect

from ....sampling import ALL
from ..pages import box, of_preset, part

Visit = Callable[[str], Page]
FOCUSED = "document.activeElement.dataset?.key"


def tabbed(visit: Visit, preset: str = "smollm2-135m") -> Page:
    """A page, the tab key pressed until a part has the keyboard."""
    shown = visit(of_preset(preset))
    for _ in range(20):
        shown.keyboard.press("Tab")
        if shown.evaluate(FOCUSED):
            return shown
    raise AssertionError("no part is reached by the tab key")


def test_arrows_walk_in_order_of_computation(visit: Visit) -> None:
    shown = tabbed(visit)
    seen = [shown.evaluate(FOCUSED)]
    for _ in range(13):
        shown.keyboard.press("ArrowDown")
        seen.append(shown.evaluate(FOCUSED))
    layer = [f"layers.0.{n}" for n in ("attn_norm", "attn", "attn_residual", "ffn_norm", "ffn", "ffn_residual")]
    assert seen == [
        "input_ids",
        "position_ids",
        "embed",
        "layers.0-29",
        *layer,
        "final_norm",
        "lm_head",
        "out.logits",
        "out.logits",
    ]
    shown.keyboard.press("ArrowUp")
    assert shown.evaluate(FOCUSED) == "lm_head"
    shown.keyboard.press("Home")
    assert shown.evaluate(FOCUSED) == "input_ids"


def test_focused_part_scrolls_into_view(visit: Visit) -> None:
    shown = tabbed(visit, "deepseek-v3")
    stage = shown.locator("#picture").bounding_box()
    assert stage is not None
    shown.keyboard.press("e")
    for key in ("End", "Home", *["ArrowDown"] * (30 if ALL else 20)):
        shown.keyboard.press(key)
        found = box(shown, shown.evaluate(FOCUSED))
        assert found["y"] >= stage["y"] and found["y"] + 20 <= stage["y"] + stage["height"]


def test_enter_opens_and_arrows_lead_in_and_out(visit: Visit) -> None:
    shown = tabbed(visit)
    for _ in range(5):
        shown.keyboard.press("ArrowDown")
    assert shown.evaluate(FOCUSED) == "layers.0.attn"
    for key, expanded in (("Enter", "true"), (" ", "false"), ("ArrowRight", "true")):
        shown.keyboard.press(key)
        assert part(shown, "layers.0.attn").get_attribute("aria-expanded") == expanded
        assert shown.evaluate(FOCUSED) == "layers.0.attn"
    shown.keyboard.press("ArrowRight")
    assert shown.evaluate(FOCUSED) == "layers.0.attn.q"
    shown.keyboard.press("Enter")
    assert shown.locator("#subject").inner_text() == "Linear"
    shown.keyboard.press("Escape")
    expect(shown.locator("#panel")).to_be_hidden()
    shown.keyboard.press("ArrowLeft")
    shown.keyboard.press("ArrowLeft")
    assert shown.evaluate(FOCUSED) == "layers.0.attn"
    assert part(shown, "layers.0.attn").get_attribute("aria-expanded") == "false"


def test_u_unrolls_a_repeat(visit: Visit) -> None:
    shown = tabbed(visit)
    for _ in range(3):
        shown.keyboard.press("ArrowDown")
    shown.keyboard.press("u")
    assert shown.evaluate("spots.has('layers.29')") and shown.evaluate(FOCUSED) == "layers.0-29"
    shown.keyboard.press("u")
    assert not shown.evaluate("spots.has('layers.29')")


def test_one_part_is_reachable_by_the_tab_key(visit: Visit) -> None:
    shown = tabbed(visit)
    shown.keyboard.press("End")
    reached = shown.locator('g.part[tabindex="0"]')
    assert reached.count() == 1 and reached.get_attribute("data-key") == "out.logits"
    outline = "getComputedStyle(document.activeElement.firstElementChild).strokeDasharray"
    assert shown.evaluate(outline) != "none"


def test_parts_have_accessible_names(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    expect(shown.locator("#picture")).to_have_role("tree")
    layers = part(shown, "layers.0-29")
    expect(layers).to_have_role("treeitem")
    told = {n: layers.get_attribute(f"aria-{n}") for n in ("level", "expanded", "posinset", "setsize", "label")}
    assert told.pop("label", "").endswith("30 times")
    assert told == {"level": "1", "expanded": "true", "posinset": "4", "setsize": "7"}
    attention = str(part(shown, "layers.0.attn").get_attribute("aria-label"))
    assert attention.startswith("Grouped-query attention") and "9 heads, 3 KV heads" in attention
    assert part(shown, "layers.0.attn_residual").get_attribute("aria-label") == "sum, attn_residual"
    for button in shown.locator("button").all():
        assert button.inner_text().strip() or button.get_attribute("aria-label")


def test_outline_lists_the_model_as_text(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    shown.get_by_role("button", name="Outline").click()
    items = shown.locator("#about li")
    assert items.count() == shown.evaluate(
        "(function n(s) { return 1 + (s.inner ?? []).reduce((t, i) => t + n(i), 0) })(DATA.root)"
    )
    shown.locator("#about li li li li").get_by_role("link").first.click()
    assert shown.evaluate("chosen") == "layers.0.attn.q"
    assert part(shown, "layers.0.attn").get_attribute("aria-expanded") == "true"


def test_help_lists_the_keys(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    shown.keyboard.press("?")
    expect(shown.locator("#help")).to_be_visible()
    assert shown.locator("#help dt").count() == shown.locator("#help dd").count() > 10
    shown.keyboard.press("Escape")
    expect(shown.locator("#help")).to_be_hidden()

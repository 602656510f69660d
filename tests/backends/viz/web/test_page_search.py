"""Search in the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from weft.backends.viz.layout.scene import build_scene
from weft.backends.viz.model.network import Network, Vertex, Weight
from weft.backends.viz.web.page import render_page

from ..pages import box, of_preset, part

Visit = Callable[[str], Page]


def is_centred(shown: Page, key: str) -> bool:
    """Check that the box of a part is in the middle of the viewport."""
    found, stage = box(shown, key), shown.locator("#picture").bounding_box()
    assert stage is not None
    apart = [
        abs(found[at] + found[size] / 2 - stage[at] - stage[size] / 2) for at, size in (("x", "width"), ("y", "height"))
    ]
    return max(apart) < 2


def test_match_in_a_folded_layer_is_opened_and_centred(visit: Visit) -> None:
    shown = visit(of_preset("deepseek-v3"))
    shown.keyboard.press("/")
    shown.keyboard.type("layers.17.attn.kv_norm")
    expect(shown.locator("#found")).to_have_text("1 match")
    assert part(shown, "layers.17.attn.kv_norm").count() == 0
    shown.keyboard.press("Enter")
    assert is_centred(shown, "layers.17.attn.kv_norm")
    assert {"chosen", "found"} <= set(str(part(shown, "layers.17.attn.kv_norm").get_attribute("class")).split())
    assert shown.locator("#subject").inner_text() == "RMSNorm"
    shown.keyboard.press("Escape")
    expect(shown.locator("#search")).to_have_value("")
    expect(shown.locator("#found")).to_have_text("")
    assert shown.locator("g.found").count() == 0


def test_enter_cycles_through_matches(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    shown.locator("#search").fill("layers.3.attn. rope")  # both words
    ours = [f"layers.3.attn.{name}" for name in ("q_rope", "k_rope")]
    expect(shown.locator("#found")).to_have_text("2 matches")
    seen = []
    for told in ("1 of 2", "2 of 2", "1 of 2"):
        shown.keyboard.press("Enter")
        expect(shown.locator("#found")).to_have_text(told)
        seen.append(shown.evaluate("chosen"))
        assert is_centred(shown, seen[-1])
    assert seen == [*ours, ours[0]]
    shown.keyboard.press("Shift+Enter")
    assert shown.evaluate("chosen") == ours[1]


def test_search_covers_titles_weights_and_operations(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    for asked, key in (
        ("grouped-query", "layers.0.attn"),  # a title
        ("swiglu", "layers.0.ffn"),
        ("layers.29.ffn.up.weight", "layers.29.ffn.up"),  # a weight
        ("rms_norm", "layers.0.attn_norm"),  # an operation
        ("logits", "out.logits"),
    ):
        shown.locator("#search").fill(asked)
        assert key in shown.evaluate("results"), asked


def test_exact_name_is_the_first_result(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    shown.locator("#search").fill("layers.2")
    assert shown.evaluate("results[0]") == "layers.2"
    assert shown.evaluate("results.indexOf('layers.2.ffn') < results.indexOf('layers.20')")


def test_search_without_matches_is_reported(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    shown.locator("#search").fill("convolution")
    expect(shown.locator("#found")).to_have_text("0 matches")
    shown.keyboard.press("Enter")
    assert shown.evaluate("chosen") is None


def operations(count: int) -> Iterator[Vertex]:
    value = "x"
    for i in range(count):
        name = f"layers.{i // 100}.op_{i % 100}"
        weight = Weight(f"{name}.weight", "[4, 4]", "f32", 64, f"Source(key='model.{name}.weight')")
        yield Vertex(name, "linear", f"layers.{i // 100}", (value,), (name,), weights=(weight,))
        value = name


@pytest.mark.long
def test_typing_is_instant_in_ten_thousand_operations(visit: Visit) -> None:
    made = tuple(operations(10_000))
    root = build_scene(Network("large", made, {"x": "f32[n]"}, {"y": (made[-1].name, "f32[n]")}))
    shown = visit(render_page(root, [root.key]))
    shown.evaluate("searchable()")
    times = shown.evaluate("""() => ["o", "op", "op_77", "weight", "layers.12.op_34"].map((text) => {
      field.value = text;
      const from = performance.now();
      search();
      return performance.now() - from })""")
    print(f"milliseconds a search takes: {times}")
    assert sorted(times)[2] < 100  # of two cores that others use too; alone 30
    assert shown.evaluate("results") == ["layers.12.op_34"]

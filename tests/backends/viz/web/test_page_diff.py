"""The page of a comparison: two models side by side, and what changed marked by more than a colour."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace

from playwright.sync_api import Page, expect

from weft import run_passes
from weft.backends.viz.compare.networks import compare_networks
from weft.backends.viz.model.network import build_network
from weft.backends.viz.model.part_costs import compute_totals
from weft.backends.viz.web.diff import convert_totals, join_pictures, list_signs, select_open_parts
from weft.backends.viz.web.page import render_page
from weft.frontends.app.api.inspect.counting import inspect

from ..pages import address, box, model_of, part

Visit = Callable[[str], Page]
LOOK = """(e) => {
  const s = getComputedStyle(e.querySelector("rect"));
  return [s.fill, s.strokeDasharray, s.strokeWidth, e.querySelector(".mark").getAttribute("d")];
}"""


@functools.cache
def difference(pipeline: str = "fuse-norm-linear") -> str:
    """SmolLM2 before and after a pipeline."""
    model = model_of("smollm2-135m").graph
    networks = build_network(model), build_network(run_passes(model, pipeline))
    found = compare_networks(*networks)
    root, numbers = join_pictures(found), [compute_totals(n, 512) for n in networks]
    return render_page(
        root, select_open_parts(root), {"kinds": list_signs(), "difference": convert_totals(found, *numbers)}
    )


def test_before_is_left_of_after(visit: Visit) -> None:
    shown = visit(difference())
    before, after = box(shown, "before"), box(shown, "after")
    assert before["x"] + before["width"] < after["x"] and before["y"] == after["y"]
    assert part(shown, "before.layers.0.attn_norm").count() == 1
    assert part(shown, "after.layers.0.attn_norm").count() == 0


def test_signs_have_colours_lines_marks_and_words(visit: Visit) -> None:
    shown = visit(difference())
    removed, changed, kept = (
        part(shown, f"before.layers.0.{name}").evaluate(LOOK) for name in ("attn_norm", "attn.q", "attn.q_rope")
    )
    for i in (0, 1, 3):
        assert len({removed[i], changed[i], kept[i]}) == 3
    assert float(kept[2].removesuffix("px")) < float(removed[2].removesuffix("px"))
    names = {
        "before.layers.0.attn_norm": "removed",
        "before.layers.0.attn.q": "changed",
        "after.layers.0.attn.q": "was Linear",
    }
    for key, word in names.items():
        assert (part(shown, key).get_attribute("aria-label") or "").split(", ")[-1] == word
    legend = [s.strip() for s in shown.locator("#legend button").all_inner_texts()]
    assert legend == ["kept", "removed", "changed"]


def test_signs_have_other_colours_in_dark(visit: Visit) -> None:
    shown = visit(difference())
    fill = "(e) => getComputedStyle(e.querySelector('rect')).fill"
    keys = ["before.layers.0.attn_norm", "after.layers.0.attn.q", "after.layers.0.attn.q_rope"]
    day = [part(shown, key).evaluate(fill) for key in keys]
    shown.locator("#theme").click()
    night = [part(shown, key).evaluate(fill) for key in keys]
    assert len({*day, *night}) == 6


def test_totals_equal_weft_inspect(visit: Visit) -> None:
    shown = visit(difference("mha-to-gqa{kv_heads=1}"))
    model = model_of("smollm2-135m")
    told = [inspect(model).json()]
    told.append(inspect(replace(model, graph=run_passes(model.graph, "mha-to-gqa{kv_heads=1}"))).json())
    titles = {
        row.locator("dt").inner_text(): row.locator("dd").get_attribute("title")
        for row in shown.locator("#difference .delta").all()
    }
    both = {name: " → ".join(f"{t[name]:,}" for t in told) for name in ("parameters", "flops_prefill")}
    assert titles["parameters"] == both["parameters"] and titles["FLOPs of 512 tokens"] == both["flops_prefill"]
    kept = [512 * t["cache_per_token_bytes"]["f16"] for t in told]
    assert titles["KV cache of 512 tokens"] == f"{kept[0]:,} → {kept[1]:,}"


def test_flops_follow_the_chosen_length(visit: Visit) -> None:
    shown = visit(difference("mha-to-gqa{kv_heads=1}"))
    shown.locator("#tokens").fill("1024")
    shown.locator("#tokens").press("Enter")
    flops = inspect(model_of("smollm2-135m"), 1024).flops_prefill
    row = shown.locator("#difference .delta", has_text="FLOPs of 1,024 tokens").locator("dd")
    assert (row.get_attribute("title") or "").startswith(f"{flops:,} → ")


def test_weights_follow_the_chosen_dtype(visit: Visit) -> None:
    shown = visit(difference("cast{dtype=f16}"))
    numbers = inspect(model_of("smollm2-135m")).parameters
    for dtype, name in (("f32", "weights"), ("f16", "weights, f32 as f16"), ("bf16", "weights, f32 as bf16")):
        shown.locator("#dtype").select_option(dtype)
        row = shown.locator("#difference .delta", has=shown.locator("dt", has_text=re.compile(f"^{name}$")))
        was, *now = (row.locator("dd").get_attribute("title") or "").replace(",", "").split(" → ")
        assert abs(int(was) - (4 if dtype == "f32" else 2) * numbers) < 500, dtype  # and a few frequencies
        if dtype == "f32":
            assert abs(int(now[0]) - 2 * numbers) < 500
        else:
            assert abs(int((now or [was])[0]) - 2 * numbers) < 500


def test_both_sides_open_and_close_together(visit: Visit) -> None:
    shown = visit(difference())
    bars = [part(shown, f"{side}.layers.0.attn") for side in ("before", "after")]
    assert [bar.get_attribute("aria-expanded") for bar in bars] == ["true", "true"]
    bars[1].locator("rect.bar").click()
    assert [bar.get_attribute("aria-expanded") for bar in bars] == ["false", "false"]
    part(shown, "before").locator("> rect.bar").click()
    sides = [part(shown, side).get_attribute("aria-expanded") for side in ("before", "after")]
    assert sides == ["false", "true"]


def test_panel_lists_changes_and_links_to_the_other_side(visit: Visit) -> None:
    shown = visit(difference())
    part(shown, "after.layers.0.attn.q").click()
    expect(shown.locator("#about h3.sign")).to_have_text("changed: norm_linear")
    told = shown.locator("#about dl.changes").inner_text()
    assert "operation" in told and "reads x" in told and "layers.0.attn_norm" in told
    shown.locator("#about a", has_text="the same on the other side").click()
    assert "at=before.layers.0.attn.q" in address(shown)


def test_changes_name_values_of_their_own_layer(visit: Visit) -> None:
    shown = visit(difference())
    shown.evaluate("go('after.layers.17.attn.q')")
    told = shown.locator("#about dl.changes").inner_text()
    assert "layers.17.attn_norm" in told and "layers.16.ffn_residual" in told and "layers.0." not in told

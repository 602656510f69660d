"""The page of a pipeline: one pass at a time, by mouse and keyboard."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable

from playwright.sync_api import Page, expect

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE, run_passes
from weft.backends.viz.compare.networks import compare_networks
from weft.backends.viz.layout.scene import build_scene
from weft.backends.viz.model.network import Network, build_network
from weft.backends.viz.web import plain
from weft.backends.viz.web.page import render_page
from weft.backends.viz.web.pipeline_page import PipelineStep, render_steps
from weft.passes import Report

from ..pages import address, drawn, model_of, part

Visit = Callable[[str], Page]
BLOCK = Block(Attention(heads=4, rope=RoPE()), GatedMLP(48), RMSNorm())
TINY = Decoder(vocab=12, dim=32, layers=3, block=BLOCK, context=64)
PIPELINE = "cse, fuse-norm-linear, kv-cache"
STATE = "[now.step, now.side]"


@functools.cache
def render_pipeline(preset: str = "smollm2-135m", pipeline: str = PIPELINE, verify: bool = False) -> str:
    graph = TINY.graph(name="tiny") if preset == "tiny" else model_of(preset).graph
    after, report = list[Network](), Report()
    run_passes(
        graph, pipeline, verify=verify, report=report, hooks=[lambda ran: after.append(build_network(ran.after))]
    )
    return render_steps(
        build_network(graph), [PipelineStep(r, n) for r, n in zip(report.records, after, strict=True)], 512
    )


def test_first_pass_with_a_change_is_shown(visit: Visit) -> None:
    shown = visit(render_pipeline())
    assert shown.evaluate(STATE) == [1, 1]
    assert shown.locator("#pass option:checked").inner_text() == "2. fuse-norm-linear"
    assert part(shown, "layers.0.attn_norm").count() == 0
    assert (part(shown, "layers.0.attn.q").get_attribute("aria-label") or "").endswith("was Linear")
    legend = [s.strip() for s in shown.locator("#legend button").all_inner_texts()]
    assert legend == ["kept", "removed", "new", "changed"]


def test_steps_by_mouse(visit: Visit) -> None:
    shown = visit(render_pipeline())
    shown.get_by_role("button", name="Before", exact=True).click()
    assert (part(shown, "layers.0.attn_norm").get_attribute("aria-label") or "").endswith("removed")
    shown.locator("#step-after").click()
    assert shown.evaluate(STATE) == [2, 0]
    expect(shown.locator("#step-after")).to_be_disabled()
    shown.locator("#pass").select_option(index=0)
    assert shown.evaluate(STATE) == [0, 0]
    expect(shown.locator("#step-before")).to_be_disabled()
    slider = shown.locator("#step").bounding_box()
    assert slider is not None
    shown.mouse.click(slider["x"] + slider["width"] - 4, slider["y"] + slider["height"] / 2)
    assert shown.evaluate(STATE) == [2, 0]


def test_steps_by_keyboard(visit: Visit) -> None:
    shown = visit(render_pipeline())
    shown.keyboard.press("ArrowRight")
    assert shown.evaluate(STATE) == [2, 1]
    shown.keyboard.press("ArrowLeft")
    shown.keyboard.press("b")
    assert shown.evaluate(STATE) == [1, 0]
    shown.keyboard.press("[")
    assert shown.evaluate(STATE) == [0, 0]
    shown.keyboard.press("[")
    assert shown.evaluate(STATE) == [0, 0]
    shown.locator("#step").focus()
    shown.keyboard.press("ArrowRight")
    assert shown.evaluate(STATE) == [1, 0]
    shown.locator('g.part[tabindex="0"]').focus()
    shown.keyboard.press("]")
    assert shown.evaluate(STATE) == [2, 0]
    shown.evaluate("walkTo(spots.get('layers.0.attn'))")
    shown.keyboard.press("ArrowRight")
    assert shown.evaluate(STATE) == [2, 0], "arrows are the parts' while one has the keyboard"


def test_open_parts_stay_open_across_steps(visit: Visit) -> None:
    shown = visit(render_pipeline())
    shown.locator("#pass").select_option(index=0)
    attention = part(shown, "layers.0.attn")
    assert attention.get_attribute("aria-expanded") == "false"
    attention.click()
    for key in ("]", "]", "[", "[", "b"):
        shown.keyboard.press(key)
        assert attention.get_attribute("aria-expanded") == "true"
    assert shown.locator("#subject").inner_text() == "Grouped-query attention"


def test_pass_without_a_change_states_the_reason(visit: Visit) -> None:
    shown = visit(render_pipeline())
    shown.locator("#pass").select_option(index=0)
    told = shown.locator("#pass-told").inner_text()
    assert "changed nothing: no match found" in told and "exact" in told
    assert shown.locator("g.part:not([data-kind=sign-kept])").count() == 0
    assert shown.locator("#difference .moved").count() == 0
    assert "(changed nothing)" in shown.locator("#pass option").first.inner_text()


def test_operation_counts_equal_those_of_the_graphs(visit: Visit) -> None:
    shown = visit(render_pipeline())
    graph = model_of("smollm2-135m").graph
    after = run_passes(graph, "fuse-norm-linear")
    row = shown.locator("#difference .delta", has_text="operations").locator("dd")
    assert row.get_attribute("title") == f"{len(graph)} → {len(after)}"
    assert f"{len(graph) - len(after)} removed" in shown.locator("#pass-told").inner_text()


def test_checks_and_largest_difference_are_shown(visit: Visit) -> None:
    """Checks on the page: what each shows, and the largest difference of outputs."""
    shown = visit(render_pipeline("tiny", "pack-qkv, mha-to-gqa{kv_heads=1}, kv-cache", True))
    told = []
    for i in range(3):
        shown.locator("#pass").select_option(index=i)
        told.append(shown.locator("#difference .shown").inner_text())
    assert all("shown: " in text for text in told)
    *_, number = told[0].rstrip(".").split()
    assert "Largest relative difference: " in told[0] and 0 <= float(number) <= 1e-12
    bare = visit(render_pipeline())
    assert "declared exact; --verify shows it" in bare.locator("#difference .shown").inner_text()


def test_address_keeps_the_step(visit: Visit) -> None:
    shown = visit(render_pipeline())
    shown.keyboard.press("]")
    shown.keyboard.press("b")
    assert "step=3" in address(shown) and "side=before" in address(shown)
    shown.evaluate("location.hash = '#step=2'")
    shown.wait_for_function("now.step === 1 && now.side === 1")


def test_search_covers_the_shown_graph(visit: Visit) -> None:
    shown = visit(render_pipeline())
    shown.locator("#search").fill("attn_norm")
    assert shown.locator("#found").inner_text() == "no matches" or shown.locator("#found").inner_text().startswith("0")
    shown.get_by_role("button", name="Before", exact=True).click()
    assert shown.locator("#found").inner_text() == "30 matches"


def test_pooled_parts_restore_the_picture_of_each_graph(visit: Visit) -> None:
    """A view of the pool is the picture that is drawn of the graph alone."""
    graph = model_of("smollm2-135m").graph
    graphs = [graph]
    for name in PIPELINE.split(", "):
        graphs.append(run_passes(graphs[-1], name))
    networks = [build_network(g) for g in graphs]
    shown = visit(render_pipeline())
    for i, (before, after) in enumerate(itertools.pairwise(networks)):
        found = compare_networks(before, after)
        for side, one in enumerate((found.before, found.after)):
            theirs = shown.evaluate("([step, side]) => rootOf(P.steps[step].views[side])", [i, side])
            ours = shown.evaluate("(root) => root", plain.convert_shape(build_scene(one)))
            assert theirs == ours


def test_steps_of_a_large_model_stay_small() -> None:
    """Thirty of 32 layers are to be less than 3 MB; these change every layer, each in another way."""
    pipeline = "fold-norm-scale, pack-qkv, pack-gate-up, fuse-residual-norm, kv-cache, cast{dtype=f16}"
    text = render_pipeline("llama3.1-8b", pipeline)
    alone = render_page(drawn("llama3.1-8b"), ())
    count = text.count('"rewrites":') - text.count('"rewrites":0')
    assert count == 6 and len(text) - len(alone) < count * 3_000_000 / 30


def test_equal_graphs_share_a_view() -> None:
    text = render_pipeline("tiny", "pack-qkv, cse, dce")
    views = json.loads(text[text.index('"views":[[') + 8 :].partition(',"steps"')[0])
    assert len(views) == 3  # before and after packing, and that in which nothing changed

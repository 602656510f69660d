"""The picture of a comparison: both networks side by side, nothing overlaps, and the sheet of totals."""

from __future__ import annotations

import functools
import itertools
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace

import pytest
from playwright.sync_api import Page, expect

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE, run_passes
from weft.backends.viz.compare.networks import compare_networks
from weft.backends.viz.formats.svg import render_svg
from weft.backends.viz.layout.coordinates import place_shapes
from weft.backends.viz.layout.font import measure_text
from weft.backends.viz.layout.scene import ALL, Shape, build_scene
from weft.backends.viz.model.network import Network, build_network, sign_to_kind
from weft.backends.viz.model.part_costs import Totals, compute_totals
from weft.backends.viz.web import plain
from weft.backends.viz.web.diff import (
    PipelineStep,
    build_sheet,
    convert_totals,
    join_pictures,
    render_steps,
    select_open_parts,
)
from weft.backends.viz.web.page import render_page
from weft.passes import Report

from ..geometry import faults
from ..pages import address, drawn, model_of, part

PAIRS = {
    "smollm2-135m": "fuse-norm-linear",
    "gpt2": "mha-to-gqa{kv_heads=4}",
    "mixtral-8x7b": "default",
    "llama3.1-8b": "mistral-7b",
    "bert-base": "t5-base",
    "mamba-130m": "deepseek-v3",
}


PRESETS = ("mistral-7b", "t5-base", "deepseek-v3")


def build_networks(name: str) -> tuple[Network, Network]:
    before, other = model_of(name).graph, PAIRS[name]
    return build_network(before), build_network(
        model_of(other).graph if other in PRESETS else run_passes(before, other)
    )


def draw_comparison(name: str) -> Shape:
    return join_pictures(compare_networks(*build_networks(name)))


@pytest.mark.parametrize("name", PAIRS)
def test_nothing_overlaps(name: str) -> None:
    root = draw_comparison(name)
    everything = {s.key for s in root.all() if s.arrangement is not None}
    for keys in ({root.key}, select_open_parts(root), everything):
        placed = place_shapes(root, keys)
        assert list(faults(placed)) == []
        before, after = placed.inner
        assert before.x + before.width < after.x and before.y == after.y
    assert {s.key.partition(".")[0] for s in root.all()} == {"", "before", "after"}
    for shape in root.all():
        told = [measure_text(line, 11) for line in shape.label.lines]
        assert (
            shape.label.symbol
            or max(measure_text(shape.label.title, 13, bold=True), *told, 0) + 20 <= shape.closed.width
        )


def test_every_operation_is_on_its_side() -> None:
    before, after = build_networks("smollm2-135m")
    root = join_pictures(compare_networks(before, after))
    for side, whole in (("before", before), ("after", after)):
        part = next(s.part for s in root.inner if s.key == side)
        names = [v.name for v in part.all_vertices() if v.op not in ("input", "output")]
        assert sorted(names) == sorted(f"{side}.{v.name}" for v in whole.vertices)


def test_changed_parts_are_open_by_default() -> None:
    root = draw_comparison("gpt2")
    keys = select_open_parts(root)
    assert {"before.layers.0.attn", "after.layers.0.attn", "after.layers.0-11"} <= keys
    assert "after.layers.0.ffn" not in keys
    assert select_open_parts(root, 1) == {"", "before", "after"}
    assert "after.layers.0.ffn" in select_open_parts(root, parts=["after.layers.0.ffn"])


def test_repeats_of_both_sides_unroll() -> None:
    root = draw_comparison("smollm2-135m")
    placed = place_shapes(root, select_open_parts(root) | {f"{side}.layers.0-29{ALL}" for side in ("before", "after")})
    keys = {p.shape.key for p in placed.all()}
    assert {"before.layers.29", "after.layers.29"} <= keys and list(faults(placed)) == []


def test_printed_comparison_has_every_sign_and_its_legend() -> None:
    before, after = build_networks("mixtral-8x7b")
    found = compare_networks(before, after)
    root = join_pictures(found)
    text = render_svg(
        root, select_open_parts(root), build_sheet(found, compute_totals(before, 512), compute_totals(after, 512))
    )
    kinds = [g.get("class", "") for g in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}g")]
    for sign in ("kept", "removed", "new", "changed"):
        assert found.counts[sign] and kinds.count(f"k-{sign_to_kind(sign)}") > 1  # a part, and its place in the legend
        assert f">{sign}</text>" in text
    assert "stroke-dasharray:7 4" in text and f"{found.counts['changed']} changed" in text


def test_sheet_lists_totals_before_and_after() -> None:
    model = model_of("smollm2-135m")
    smaller = replace(model, graph=run_passes(model.graph, "mha-to-gqa{kv_heads=1}, fuse-norm-linear, kv-cache"))
    networks = build_network(model.graph), build_network(smaller.graph)
    found = compare_networks(*networks)
    before, then = (compute_totals(n, 512) for n in networks)
    rows = dict(build_sheet(found, before, then).rows)
    was, now = len(model.graph), len(smaller.graph)
    assert rows["Operations"] == f"{was}, then {now} (−{was - now})"
    assert rows["KV cache per token"] == "22.5 KiB, then 7.5 KiB (−15.0 KiB)"
    assert "State per text" not in rows
    assert convert_totals(found, before, then)["operations"] == [was, now]
    counts = convert_totals(found, before, then)["counts"]
    assert counts["kept"] + counts["changed"] + counts["removed"] == was
    assert counts["kept"] + counts["changed"] + counts["new"] == now


def test_sheet_lists_weights_with_their_dtype() -> None:
    model = model_of("smollm2-135m")
    networks = build_network(model.graph), build_network(run_passes(model.graph, "cast{dtype=f16}"))
    before, then = (compute_totals(n, 512) for n in networks)
    assert (before.dtypes, then.dtypes) == (("f32",), ("f16",)) and before.weights == 4 * before.open
    rows = dict(build_sheet(compare_networks(*networks), before, then).rows)
    assert rows["Weights"] == "513.1 MiB in f32, then 256.6 MiB in f16 (−256.6 MiB)"
    (wide, packed), (left, rest) = convert_totals(compare_networks(*networks), before, then)["weights"]
    assert (4 * wide, packed) == (before.weights, 0)
    assert left < 100 and rest == then.weights - 4 * left  # frequencies of rotary positions stay f32


def test_sheet_lists_equal_totals_once() -> None:
    same = Totals(3, 12, 99, 8, 0, 48, 512, 12, ("f32",))
    one = build_network(model_of("smollm2-135m").graph)
    rows = dict(build_sheet(compare_networks(one, one), same, same).rows)
    assert rows == {
        "Operations": "3",
        "Parameters": "12",
        "FLOPs, 512 tokens": "99",
        "KV cache per token": "8 B",
        "Weights": "48 B in f32",
    }


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


@pytest.mark.long
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


@pytest.mark.long
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

"""The picture of a comparison: both networks side by side, nothing overlaps, and the sheet of totals."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from weft import run_passes
from weft.backends.viz.compare.networks import compare_networks
from weft.backends.viz.formats.svg import render_svg
from weft.backends.viz.layout.coordinates import place_shapes
from weft.backends.viz.layout.font import measure_text
from weft.backends.viz.layout.scene import ALL, Shape
from weft.backends.viz.model.network import Network, build_network, sign_to_kind
from weft.backends.viz.model.part_costs import Totals, compute_totals
from weft.backends.viz.web.diff import build_sheet, convert_totals, join_pictures, select_open_parts

from ..geometry import faults
from ..pages import model_of

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

"""The picture of a comparison: both networks side by side, nothing over another, text in its box."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from weft import run_passes
from weft.backends.viz.compare.networks import compare_networks
from weft.backends.viz.formats.svg import render_svg
from weft.backends.viz.layout.coordinates import place_shapes
from weft.backends.viz.layout.font import measure_text
from weft.backends.viz.layout.scene import ALL, Shape
from weft.backends.viz.model.marks import sign_to_kind
from weft.backends.viz.model.network import Network, build_network
from weft.backends.viz.model.totals import compute_totals
from weft.backends.viz.web.diff import build_sheet, join_pictures, select_open_parts

from .geometry import faults
from .pages import model_of

PAIRS = {
    "smollm2-135m": "fuse-norm-linear",
    "gpt2": "mha-to-gqa{kv_heads=4}",
    "mixtral-8x7b": "default",
    "llama3.1-8b": "mistral-7b",
    "bert-base": "t5-base",
    "mamba-130m": "deepseek-v3",
}
PRESETS = ("mistral-7b", "t5-base", "deepseek-v3")


def networks(name: str) -> tuple[Network, Network]:
    before, other = model_of(name).graph, PAIRS[name]
    return build_network(before), build_network(
        model_of(other).graph if other in PRESETS else run_passes(before, other)
    )


def drawn(name: str) -> Shape:
    return join_pictures(compare_networks(*networks(name)))


@pytest.mark.parametrize("name", PAIRS)
def test_nothing_overlaps(name: str) -> None:
    root = drawn(name)
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


def test_all_operations_are_there_on_their_side() -> None:
    before, after = networks("smollm2-135m")
    root = join_pictures(compare_networks(before, after))
    for side, whole in (("before", before), ("after", after)):
        part = next(s.part for s in root.inner if s.key == side)
        names = [v.name for v in part.all_vertices() if v.op not in ("input", "output")]
        assert sorted(names) == sorted(f"{side}.{v.name}" for v in whole.vertices)


def test_what_changed_is_open_at_first() -> None:
    root = drawn("gpt2")
    keys = select_open_parts(root)
    assert {"before.layers.0.attn", "after.layers.0.attn", "after.layers.0-11"} <= keys
    assert "after.layers.0.ffn" not in keys
    assert select_open_parts(root, 1) == {"", "before", "after"}
    assert "after.layers.0.ffn" in select_open_parts(root, parts=["after.layers.0.ffn"])


def test_layers_of_both_sides_can_be_drawn_one_by_one() -> None:
    root = drawn("smollm2-135m")
    placed = place_shapes(root, select_open_parts(root) | {f"{side}.layers.0-29{ALL}" for side in ("before", "after")})
    keys = {p.shape.key for p in placed.all()}
    assert {"before.layers.29", "after.layers.29"} <= keys and list(faults(placed)) == []


def test_paper_has_every_sign_and_its_legend() -> None:
    before, after = networks("mixtral-8x7b")
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

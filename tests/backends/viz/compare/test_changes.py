"""Differences of corresponding operations: all of them, and their summary."""

from __future__ import annotations

from dataclasses import replace

from weft.backends.viz.compare.networks import Comparison, compare_networks
from weft.backends.viz.model.labels import label_part
from weft.backends.viz.model.network import Network, build_network
from weft.backends.viz.model.outline import build_outline
from weft.passes import run_passes

from ..pages import model_of


def summarize_boxes(found: Comparison) -> dict[str, str]:
    """The lines about what changed, by the last names of operations of the first layer and outside layers."""
    parts = [part for part in build_outline(found.after).parts() if part.vertices]
    kept = {p.path: label_part(p).lines for p in build_outline(strip_marks(found.after)).parts() if p.vertices}
    return {p.path: " / ".join(label_part(p).lines[len(kept[p.path]) :]) for p in parts if p.path in kept}


def strip_marks(found: Network) -> Network:
    """`found` without marks."""
    return replace(found, vertices=tuple(replace(v, mark=None) for v in found.vertices), marks={})


def test_boxes_summarize_changes() -> None:
    model = model_of("gpt2").graph
    words = summarize_boxes(
        compare_networks(build_network(model), build_network(run_passes(model, "mha-to-gqa{kv_heads=4}")))
    )
    assert words["layers.0.attn.attention"] == "was 12 heads"
    assert words["layers.0.attn.k"] == "was 768 to 768" and words["layers.0.attn.q"] == ""
    model = model_of("smollm2-135m").graph
    words = summarize_boxes(
        compare_networks(build_network(model), build_network(run_passes(model, "fuse-norm-linear")))
    )
    assert words["layers.0.attn.q"] == "was Linear"
    words = summarize_boxes(compare_networks(build_network(model), build_network(run_passes(model, "cast{dtype=f16}"))))
    assert words["layers.0.attn.o"] == "was f32"


def test_changes_list_old_and_new_values() -> None:
    model = model_of("gpt2").graph
    found = compare_networks(build_network(model), build_network(run_passes(model, "mha-to-gqa{kv_heads=4}")))
    changes = {v.name: {c.what: (c.before, c.after) for c in v.mark.changes} for v in found.after.vertices if v.mark}
    assert changes["layers.0.attn.attention"] == {"kv_heads": ("12", "4")}
    assert changes["layers.0.attn.k"]["weight: type"] == ("f32[768, 768]", "f32[256, 768]")
    was, now = changes["layers.0.attn.k"]["weight: recipe"]
    assert was != now and was in now

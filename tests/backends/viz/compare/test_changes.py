"""Differences of corresponding operations: all of them, and their summary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weft.backends.viz.compare.changes import find_changes, strip_tensor_names, summarize_changes
from weft.backends.viz.compare.networks import Comparison, compare_networks
from weft.backends.viz.model.labels import label_part
from weft.backends.viz.model.network import Network, Vertex, Weight, build_network
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


def linear(**changes: Any) -> Vertex:
    weight = Weight("q.weight", "[8, 4]", "f32", 128, "source(key='q')")
    plain = Vertex("q", "linear", "", ("x",), ("q",), ("x",), ("f32[n, 8]",), {"axis": "1"}, (weight,))
    return replace(plain, **changes)


def list_changes(before: Vertex, after: Vertex, **names: str) -> list[tuple[str, str, str]]:
    return [(c.what, c.before, c.after) for c in find_changes(before, after, names, lambda w: w.recipe)]


def test_equal_operations_have_no_changes() -> None:
    assert list_changes(linear(), linear()) == []
    assert list_changes(linear(), linear(reads=("renamed",)), x="renamed") == []


def test_changes_cover_operator_attributes_operands_types_and_weights() -> None:
    assert list_changes(linear(), linear(op="matmul", attrs={})) == [("operation", "linear", "matmul")]
    assert list_changes(linear(), linear(attrs={"axis": "2"})) == [("axis", "1", "2")]
    assert list_changes(linear(), linear(attrs={})) == [("axis", "1", "not set")]
    assert list_changes(linear(), linear(reads=("x", "m"), roles=("x", "mask"))) == [("reads mask", "not set", "m")]
    assert list_changes(linear(), linear(types=("f16[n, 8]",))) == [("makes", "f32[n, 8]", "f16[n, 8]")]
    other = replace(linear().weights[0], dtype="f16", recipe="source(key='k')")
    assert list_changes(linear(), linear(weights=(other,))) == [
        ("weight: type", "f32[8, 4]", "f16[8, 4]"), ("weight: recipe", "source(key='q')", "source(key='k')")
    ]  # fmt: skip
    assert list_changes(linear(), linear(weights=()))[0] == ("weight: type", "f32[8, 4]", "none")


@pytest.mark.parametrize(
    ("changes", "summary"),
    [
        ({"op": "norm_linear"}, ("was Linear",)),
        ({"attrs": {"axis": "2"}}, ("axis was 1",)),
        ({"reads": ("x", "m"), "roles": ("x", "mask")}, ("reads mask too",)),
        ({"reads": ("z",)}, ("reads other values",)),
        ({"reads": (), "roles": ()}, ("reads no x now",)),
        ({"types": ("f16[n, 8]",)}, ("was f32",)),
        ({"types": ("f32[n, 9]",)}, ("was f32[n, 8]",)),
        ({"weights": (Weight("q.weight", "[8, 4]", "f32", 128, "zeros"),)}, ("other weights",)),
        ({"weights": (Weight("q.weight", "[6, 4]", "f32", 96, "source(key='q')"),)}, ("was 4 to 8",)),
    ],
)
def test_changes_are_summarized(changes: dict[str, Any], summary: tuple[str, ...]) -> None:
    before, after = linear(), linear(**changes)
    assert summarize_changes(before, after, find_changes(before, after, {}, lambda w: w.recipe)) == summary


def test_tensor_names_are_stripped_with_escaped_quotes() -> None:
    assert (
        strip_tensor_names(r"""add(source(key='a\'b'), source(key="c"), 2)""")
        == "add(source(key=''), source(key=''), 2)"
    )

"""Correspondence of the operations of two networks, and their marks."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from weft.backends.viz.compare.networks import (
    Comparison,
    compare_networks,
    find_changes,
    mark_place,
    strip_tensor_names,
    summarize_changes,
)
from weft.backends.viz.model.labels import label_part
from weft.backends.viz.model.network import CHANGED, KEPT, NEW, REMOVED, Network, Vertex, Weight, build_network
from weft.backends.viz.model.outline import build_outline
from weft.ir import Graph, Node, Param, parse
from weft.ir.recipes.spelling import spell
from weft.passes import all_passes, run_passes

from ....passes.zoo import ZOO
from ..pages import model_of, network_of
from .marked import marked

EXAMPLES = [name for name, kind in all_passes().items() if kind.documentation().graph]


RENUMBERING = {"prune-layers", "insert-layers", "repeat-layers"}  # what they leave has the names of other layers


@functools.cache
def run_example(name: str) -> tuple[Graph, Graph]:
    """The example of a pass, before and after it."""
    documentation = all_passes()[name].documentation()
    before = parse(documentation.graph)
    return before, run_passes(before, documentation.pipeline)


def compare_example(name: str) -> Comparison:
    return compare_networks(*map(build_network, run_example(name)))


def list_names(graph: Graph) -> set[str]:
    return {node.output.name for node in graph.nodes}


def describe_node(node: Node) -> Any:
    """All that tells an operation from another, by what the graph itself says."""
    operands = [None if v is None else v.recipe if isinstance(v, Param) else v.name for v in node.inputs]
    kinds = [v.type for v in node.inputs if isinstance(v, Param)]
    attrs = {k: spell(v) for k, v in node.attrs.items()}
    return node.op.name, attrs, operands, kinds, [v.type for v in node.outputs]


@pytest.mark.parametrize("name", EXAMPLES)
def test_marks_equal_set_differences_of_names(name: str) -> None:
    before, after = run_example(name)
    found = compare_example(name)
    removed, new = marked(found.before, REMOVED), marked(found.after, NEW)
    assert not removed & new
    assert marked(found.before, CHANGED) == {a for a, b in found.pairs.items() if b in marked(found.after, CHANGED)}
    assert len(found.pairs) == len({*found.pairs.values()}) == len(before) - len(removed) == len(after) - len(new)
    if name in RENUMBERING:
        return
    gone, come = list_names(before) - list_names(after), list_names(after) - list_names(before)
    renamed = {a: b for a, b in found.pairs.items() if a != b}
    assert removed == gone - renamed.keys() and new == come - {*renamed.values()}
    if not renamed:
        ours, theirs = ({n.output.name: describe_node(n) for n in graph.nodes} for graph in (before, after))
        assert marked(found.after, CHANGED) == {n for n in ours.keys() & theirs.keys() if ours[n] != theirs[n]}


def test_examples_of_passes_have_every_sign() -> None:
    """No comparison above is of two equal networks, and every sign is met."""
    signs = {v.mark.sign for name in EXAMPLES for v in compare_example(name).after.vertices if v.mark}
    signs |= {v.mark.sign for name in EXAMPLES for v in compare_example(name).before.vertices if v.mark}
    assert signs == {KEPT, REMOVED, NEW, CHANGED}
    for name in EXAMPLES:
        found = compare_example(name)
        signs = {v.mark.sign for n in (found.before, found.after) for v in n.vertices if v.mark}
        ends = {m.sign for n in (found.before, found.after) for m in n.marks.values()}
        assert (signs | ends) != {KEPT}, name


@pytest.mark.parametrize("name", [name for name in ZOO if name.startswith(("variant/", "cached/"))])
def test_equal_networks_have_only_kept_marks(name: str) -> None:
    found = compare_networks(build_network(ZOO[name]()), build_network(ZOO[name]()))
    assert found.counts == {KEPT: len(found.after.vertices), REMOVED: 0, NEW: 0, CHANGED: 0}
    assert {mark.sign for mark in found.after.marks.values()} == {KEPT}
    assert all(a == b for a, b in found.pairs.items())


def test_linears_replaced_by_a_split_are_removed() -> None:
    """A split makes what two linears made: these are not the linear that is new."""
    model = model_of("smollm2-135m").graph
    found = compare_networks(build_network(model), build_network(run_passes(model, "pack-qkv")))
    assert {name.rpartition(".")[2] for name in marked(found.before, REMOVED)} == {"k", "v"}
    assert {name.rpartition(".")[2] for name in marked(found.after, NEW)} == {"qkv"}
    assert {name.rpartition(".")[2] for name in marked(found.after, CHANGED)} == {"q"}


def test_only_the_new_network_describes_changes() -> None:
    found = compare_networks(*(network_of(name) for name in ("llama3.1-8b", "mistral-7b")))
    assert all(not m.words for m in (*found.before.marks.values(), *(v.mark for v in found.before.vertices if v.mark)))
    assert found.after.marks["out.logits"].words == ("was f32[batch, seq, 128256]",)
    assert found.before.marks["out.logits"].sign == CHANGED


def test_layers_with_equal_changes_fold() -> None:
    model = model_of("smollm2-135m").graph
    every = build_outline(
        compare_networks(build_network(model), build_network(run_passes(model, "fuse-norm-linear"))).after
    )
    assert [part.count for part in every.children if part.count > 1] == [30]
    one = build_outline(
        compare_networks(build_network(model), build_network(run_passes(model, "prune-layers{layers=[5]}"))).before
    )
    assert [part.path for part in one.children if part.path.startswith("layers.")] == [
        "layers.0-4",
        "layers.5",
        "layers.6",
        "layers.7-29",
    ]


RENAMED = """
graph g {{
  input %x: f32[batch, seq, 4]
  param %up.weight: f32[4, 4] = source("{0}up")
  %{1}: f32[batch, seq, 4] = linear(%x, %up.weight)
  %z: f32[batch, seq, 4] = relu(%{1})
  output out = %z
}}
"""


def test_renamed_operation_is_matched_by_its_neighbours() -> None:
    found = compare_networks(
        build_network(parse(RENAMED.format("", "a"))), build_network(parse(RENAMED.format("", "b")))
    )
    assert found.pairs == {"a": "b", "z": "z"} and found.counts[KEPT] == 2


def test_operation_without_common_neighbours_is_new() -> None:
    """Of one kind, but with other weights, neighbours and names."""
    before = parse(RENAMED.format("", "a"))
    after = parse(RENAMED.format("", "b").replace("%z", "%c").replace("relu", "gelu").replace('"up"', '"down"'))
    found = compare_networks(build_network(before), build_network(after))
    assert found.pairs == {} and found.counts == {KEPT: 0, REMOVED: 2, NEW: 2, CHANGED: 0}


def test_tensor_names_are_compared_only_if_checkpoints_share_some() -> None:
    """Two checkpoints that share no name are of two formats: that their names differ says nothing."""
    before, after = (build_network(parse(RENAMED.format(key, "a"))) for key in ("", "model."))
    assert compare_networks(before, after).counts[KEPT] == 2
    two = RENAMED.replace("  %z:", "  %y: f32[batch, seq, 4] = linear(%x, %b)\n  %z:").replace(
        "  %{1}", '  param %b: f32[4, 4] = source("b")\n  %{1}', 1
    )
    before, after = (build_network(parse(two.format(key, "a"))) for key in ("", "model."))
    assert compare_networks(before, after).counts[CHANGED] == 1


def test_layers_after_a_pruned_layer_correspond() -> None:
    """Layers after a pruned one have other indices and no changes."""
    model = model_of("smollm2-135m").graph
    found = compare_networks(build_network(model), build_network(run_passes(model, "prune-layers{layers=[5]}")))
    assert {name.split(".")[1] for name in marked(found.before, REMOVED)} == {"5"}
    assert found.pairs["layers.6.attn.q"] == "layers.5.attn.q"
    assert found.pairs["layers.4.attn.q"] == "layers.4.attn.q"
    readers = {v.name for v in found.after.vertices if v.mark and v.mark.sign == CHANGED}
    assert readers == {"layers.5.attn_norm", "layers.5.attn_residual"} and not marked(found.after, NEW)


def test_layers_of_different_models_correspond_by_position() -> None:
    small, large = (network_of(name) for name in ("smollm2-135m", "deepseek-v3"))
    found = compare_networks(small, large)
    assert all(a.split(".")[:2] == b.split(".")[:2] for a, b in found.pairs.items() if a.startswith("layers."))
    assert {a.split(".")[1] for a in found.pairs if a.startswith("layers.")} == {str(i) for i in range(30)}
    alone = {name for name in marked(found.after, NEW) if int(name.split(".")[1]) >= 30}
    assert len(alone) == sum(v.scope.startswith("layers.") and int(v.scope.split(".")[1]) >= 30 for v in large.vertices)


def test_a_place_is_marked_in_both_networks_and_nowhere_else() -> None:
    before, after = network_of("smollm2-135m"), build_network(run_passes(model_of("smollm2-135m").graph, "pack-qkv"))
    foreign = replace(after, vertices=tuple(replace(v, file_names=(f"/{v.name}",)) for v in after.vertices))
    place = mark_place(before, foreign, {"/layers.3.attn.attention"}, "window")
    assert marked(place.after, CHANGED) == {"layers.3.attn.attention"}
    found = mark_place(before, after, {"layers.3.attn.attention"}, "window")
    for network in (found.before, found.after):
        assert marked(network, CHANGED) == {"layers.3.attn.attention"}
        assert not marked(network, NEW) and not marked(network, REMOVED)
    assert found.counts[CHANGED] == 1


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

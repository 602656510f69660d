"""Comparison of graphs: fused graphs are equal, differences are named."""

from __future__ import annotations

from typing import Any

import pytest

from weft.frontends.dsl import GatedMLP, RMSNorm, RoPE
from weft.frontends.export.matching import check_exportable, match_graphs
from weft.ir import Graph, TensorType, WeftError, ops
from weft.ir.recipes import Source
from weft.ir.types import dtypes, sizes
from weft.passes import run_passes
from weft.passes.forms import canonicalize

from .graphs import decoder


def add_sources(graph: Graph) -> Graph:
    """`graph` with weights that come from a checkpoint, as a family's do."""
    for name, param in graph.params.items():
        if not param.recipe.is_constant:
            param.recipe = Source(name)
    return graph


def list_differences(ours: Graph, theirs: Graph) -> list[tuple[str, str, str]]:
    found = match_graphs(canonicalize(ours), canonicalize(add_sources(theirs)))
    return [(d.at, d.ours, d.theirs) for d in found.differences]


@pytest.mark.parametrize("pipeline", ["dce", "pack-qkv, pack-gate-up", "fuse-residual-norm", "fuse-norm-linear, cse"])
def test_fused_graph_matches_the_plain_one(pipeline: str) -> None:
    assert list_differences(run_passes(decoder(), pipeline), decoder()) == []


def test_missing_weights_and_biases_are_neutral() -> None:
    """Norms without weights and linears without biases stand for ones and zeros; what is there besides does not."""
    plain, whole = decoder(norm=RMSNorm(weight=False)), decoder(attention={"qkv_bias": True})
    found = match_graphs(canonicalize(plain), canonicalize(add_sources(whole)))
    assert found.differences == []
    assert (found.params["layers.0.attn_norm.weight"], found.params["final_norm.weight"]) == (1.0, 1.0)
    told = list_differences(whole, decoder())
    assert told[0] == ("layers.0.attn.q", "a bias", "no bias") and len(told) == 6


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attention": {"window": 3}}, ("layers.0.attn.attention", "window=3", "window=none")),
        ({"attention": {"scale": 0.3}}, ("layers.0.attn.attention", "scale=0.3", "scale=0.5")),
        ({"attention": {"rope": RoPE(500.0)}}, ("rope.frequencies", "other values", "those of its rope.frequencies")),
        (
            {"attention": {"rope": RoPE(interleaved=True)}},
            ("layers.0.attn.q_rope", "interleaved=true", "interleaved=false"),
        ),
        ({"attention": {"rope": None}}, ("layers.0.attn.q_rope", "linear", "rope")),
        ({"norm": RMSNorm(1e-3)}, ("layers.0.attn_norm", "eps=0.001", "eps=1e-06")),
        ({"ffn": GatedMLP(24, "gelu")}, ("layers.0.ffn.glu", 'activation="gelu"', 'activation="silu"')),
        ({"ffn": GatedMLP(25)}, ("layers.0.ffn.gate.weight", "[25, 16]", "[24, 16]")),
        ({"tie_embeddings": True}, ("lm_head.weight", "", "")),
        ({"embed_scale": 3.0}, ("embed", "affine", "embedding")),
        ({"layers": 3}, ("embed", "add", "embedding")),
    ],
)
def test_first_difference_is_named(changes: dict[str, Any], told: tuple[str, str, str]) -> None:
    found = list_differences(decoder(**changes), decoder())
    if "tie_embeddings" in changes:  # a family without ties holds the table twice
        assert found == []
        assert list_differences(decoder(), decoder(**changes))[0][0] == "embed.weight"
    else:
        assert found[0] == told


def test_operand_order_of_additions_does_not_matter() -> None:
    ours = decoder()
    for node in ours.nodes:
        if node.op is ops.add:
            a, b = node.inputs
            node.set_input(0, b), node.set_input(1, a)
    assert list_differences(ours, decoder()) == []


def test_number_of_operands_is_compared() -> None:
    """No operand is skipped."""

    def joined(count: int) -> Graph:
        graph = Graph()
        x = graph.add_input("x", TensorType(dtypes.f32, (sizes.sym("batch"), 4)))
        graph.add_output("y", ops.concat(*[x] * count, axis=0))
        return graph

    (told,) = match_graphs(joined(3), joined(2)).differences
    assert (told.ours, told.theirs) == ("3 operands", "2 operands")
    assert match_graphs(joined(2), joined(2)).differences == []


def test_graphs_with_caches_or_last_logits_only_are_not_exportable() -> None:
    check_exportable(decoder())
    with pytest.raises(WeftError, match="export before the pass kv-cache"):
        check_exportable(run_passes(decoder(), "kv-cache"))
    last = Graph()
    last.add_output("logits", last.add_input("x", TensorType(dtypes.f32, (sizes.sym("batch"), 1, 17))))
    with pytest.raises(WeftError, match="export before the pass last-token-logits"):
        check_exportable(last)

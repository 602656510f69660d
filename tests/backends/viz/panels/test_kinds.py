"""Kinds of attention and short names of their layers."""

from __future__ import annotations

from weft import (
    Attention,
    Block,
    Decoder,
    GatedMLP,
    Mamba,
    RMSNorm,
    load_source,
)
from weft.backends.viz.model.network import build_network
from weft.backends.viz.panels.kinds import abbreviate_layers, group_by_kind

from .graphs import panels_of


def test_layer_scopes_are_abbreviated() -> None:
    assert abbreviate_layers([f"layers.{i}.attn" for i in range(8)]) == "layers 0–7"
    assert abbreviate_layers([f"layers.{i}.attn" for i in range(0, 8, 2)]) == "layers 0, 2 … 6"
    assert abbreviate_layers(["layers.3.attn"]) == "layer 3"
    assert abbreviate_layers([f"layers.{i}.attn" for i in (0, 1, 2, 4, 5, 6)]) == "layers 0–2, 4–6"


def test_hybrid_model_has_one_kind_of_attention() -> None:
    blocks = [Block(Mamba(48, state=5, conv=4), norm=RMSNorm()), Block(Attention(4, 2, window=8), GatedMLP(48))]
    graph = load_source(Decoder(50, 32, blocks * 2, context=64)).graph
    assert [len(found) for found in group_by_kind(build_network(graph)).values()] == [2]
    reach = panels_of(graph)["attention"]["reach"]
    assert [back for _, back, _ in reach["steps"]] == [None] * 4

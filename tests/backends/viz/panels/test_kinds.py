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
from weft.backends.viz.model.network import Network, Vertex, build_network
from weft.backends.viz.panels.kinds import Kind, abbreviate_layers, group_by_kind, list_attentions
from weft.ir.schema.visible_keys import VisibleKeys

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


def test_scopes_without_numbers_and_long_lists_are_abbreviated() -> None:
    assert abbreviate_layers(["encoder.layers.0.attn", "decoder.layers.0.cross"]) == "encoder layer 0; decoder layer 0"
    assert abbreviate_layers(["attention"]) == "attention"
    assert abbreviate_layers(["0.attn", "1.attn"]) == "0–1"
    assert (
        abbreviate_layers([f"h.{i}" for i in (0, 3, 4, 9, 11, 15, 16, 20, 22, 24, 26, 29)]) == "h 0, 3–4, 9, 11, …, 29"
    )
    assert abbreviate_layers([]) == ""


def test_kind_is_read_off_attributes_operands_and_types() -> None:
    attrs = {"heads": "8", "kv_heads": "2", "causal": "True", "window": "4", "keep_first": "1", "pattern": "'dense'"}
    plain = Vertex("a", "attention", "", ("q", "k", "v"), ("a",), ("q", "k", "v"), attrs=attrs)
    cross = Vertex("b", "attention", "", ("q", "m", "v", "s"), ("b",), ("q", "k", "v", "sinks"), attrs={"heads": "8"})
    inputs = {"q": "f32[batch, seq, 8]", "k": "f32[batch, seq, 8]", "m": "f32[batch, source, 8]", "v": "", "s": ""}
    (first, one), (second, other) = list_attentions(Network("net", (plain, cross), inputs, {}))
    assert (first.name, second.name) == ("a", "b")
    assert one == Kind(8, 2, VisibleKeys(causal=True, window=4, keep_first=1), False, False, False)
    assert other == Kind(8, 8, VisibleKeys(causal=False), True, True, False)


def test_attention_within_windows_folded_into_the_batch_is_left_out() -> None:
    inputs = {"q": "f32[batch*7, 49, 8]"}
    vertex = Vertex("a", "attention", "", ("q", "q", "q"), ("a",), ("q", "k", "v"), attrs={"heads": "8"})
    assert list(list_attentions(Network("net", (vertex,), inputs, {}))) == []

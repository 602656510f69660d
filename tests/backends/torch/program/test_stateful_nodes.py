"""Nodes with caches and states: those of decoders, and cross-attentions of encoder-decoders."""

from __future__ import annotations

from weft import MLP, ALiBi, Attention, Block, Decoder, Encoder, Mamba
from weft.backends.torch.program.stateful_nodes import (
    check_cache_writes,
    find_cached_nodes,
    find_cross_attentions,
    find_key_bias_nodes,
    find_subset_node,
)
from weft.passes import run_passes

from ..generated import graph_of

LAYER = Block(Attention(2), MLP(24))


def test_attentions_and_recurrences_of_a_decoder_are_cached() -> None:
    graph = Decoder(23, 16, [LAYER, Block(Mamba(16, state=4))]).graph()
    assert {n.op.name for n in find_cached_nodes(graph)} == {"attention", "causal_conv", "selective_scan"}
    assert find_subset_node(graph) is None
    check_cache_writes(graph)
    assert find_cross_attentions(graph, find_cached_nodes(graph)) == set()


def test_encoders_and_graphs_with_caches_have_no_cached_nodes() -> None:
    encoder = Encoder(23, 16, 1, Block(Attention(2, causal=False), MLP(24))).graph()
    assert find_cached_nodes(encoder) == set()
    assert find_cached_nodes(run_passes(Decoder(23, 16, 1, LAYER).graph(), "kv-cache")) == set()


def test_cross_attentions_read_keys_of_the_encoder() -> None:
    graph = graph_of("variant/encoder-decoder")
    cached = find_cached_nodes(graph)
    crosses = find_cross_attentions(graph, cached)
    assert crosses and {n.scope.rpartition(".")[2] for n in crosses} == {"cross"} and crosses.isdisjoint(cached)
    assert all(n.scope.startswith("decoder.") for n in cached)
    assert find_cross_attentions(graph, set()) == set()


def test_bias_nodes_of_cached_attentions_count_keys() -> None:
    graph = Decoder(23, 16, 1, Block(Attention(2, bias=ALiBi()), MLP(24))).graph()
    assert "alibi" in {n.op.name for n in find_key_bias_nodes(graph, find_cached_nodes(graph))}
    assert find_key_bias_nodes(graph, set()) == set()

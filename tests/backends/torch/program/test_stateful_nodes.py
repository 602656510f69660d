"""Nodes with caches and states: those of decoders, and cross-attentions of encoder-decoders."""

from __future__ import annotations

from typing import Any

import pytest

from weft import MLP, ALiBi, Attention, Block, Decoder, Encoder, Mamba, RoPE
from weft.backends.torch.program.emitter import Emitter
from weft.backends.torch.program.stateful_nodes import (
    add_cache_advance,
    begin_forward,
    check_cache_writes,
    emit_key_positions,
    emit_query_positions,
    emit_rolling_positions,
    find_cached_nodes,
    find_cross_attentions,
    find_key_bias_nodes,
    find_rolling_capacity,
    find_subset_node,
)
from weft.ir import Graph
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


def attention_graph(**options: Any) -> Graph:
    return Decoder(23, 16, 1, Block(Attention(2, rope=RoPE(), **options), MLP(24))).graph()


def emitter_of(graph: Graph) -> Emitter:
    emitter = Emitter(graph, find_cached_nodes(graph), set())
    begin_forward(emitter)
    return emitter


def test_positions_default_to_those_after_the_cached_tokens() -> None:
    emitter = emitter_of(attention_graph())
    assert [(v.name, v.default) for v in emitter.program.inputs] == [
        ("input_ids", ""), ("position_ids", "None"), ("cache", "None"),
    ]  # fmt: skip
    start, positions = emitter.program.statements
    assert start.text == "0 if {0} is None else {0}.advance({1}.shape[1])"
    assert positions.text.startswith("torch.arange({1}, {1} + {2}.shape[1]") and positions.operands[1] is emitter.start
    assert emit_query_positions(emitter) is positions.results[0]


def test_key_positions_are_emitted_once() -> None:
    emitter = emitter_of(attention_graph())
    assert emit_key_positions(emitter) is emit_key_positions(emitter)
    rolling = emit_rolling_positions(emitter, 8, 2)
    assert emitter.program.statements[-1].text == "rolling_positions({0}, {1}, {2}, 8, 2)"
    assert emit_rolling_positions(emitter, 8, 2) is rolling is not emit_rolling_positions(emitter, 8, 0)


def test_cache_is_advanced_if_no_statement_reads_its_length() -> None:
    emitter = emitter_of(attention_graph())
    statements = emitter.program.statements
    assert add_cache_advance(emitter, statements) is statements
    advance, *rest = add_cache_advance(emitter, statements[1:])
    assert rest == statements[1:] and advance.text.endswith("{0}.advance({1}.shape[1])") and advance.results == ()
    emitter.start = None
    assert add_cache_advance(emitter, []) == []


@pytest.mark.parametrize(
    ("options", "capacity"), [({}, None), ({"window": 5}, (5, 0)), ({"window": 5, "keep_first": 2}, (7, 2))]
)
def test_rolling_cache_has_room_for_the_window_and_the_first_keys(options: Any, capacity: Any) -> None:
    (node,) = (n for n in attention_graph(**options).nodes if n.op.name == "attention")
    assert find_rolling_capacity(node) == capacity

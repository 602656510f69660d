"""Positions of new tokens and keys, and capacities of rolling caches."""

from __future__ import annotations

from typing import Any

import pytest

from weft import MLP, Attention, Block, Decoder, RoPE
from weft.backends.torch.program.emitter import Emitter
from weft.backends.torch.program.stateful_nodes import find_cached_nodes
from weft.backends.torch.program.token_positions import (
    add_cache_advance,
    begin_forward,
    emit_key_positions,
    emit_query_positions,
    emit_rolling_positions,
    find_rolling_capacity,
)
from weft.ir import Graph


def graph_of(**options: Any) -> Graph:
    return Decoder(23, 16, 1, Block(Attention(2, rope=RoPE(), **options), MLP(24))).graph()


def emitter_of(graph: Graph) -> Emitter:
    emitter = Emitter(graph, find_cached_nodes(graph), set())
    begin_forward(emitter)
    return emitter


def test_positions_default_to_those_after_the_cached_tokens() -> None:
    emitter = emitter_of(graph_of())
    assert [(v.name, v.default) for v in emitter.program.inputs] == [
        ("input_ids", ""), ("position_ids", "None"), ("cache", "None"),
    ]  # fmt: skip
    start, positions = emitter.program.statements
    assert start.text == "0 if {0} is None else {0}.advance({1}.shape[1])"
    assert positions.text.startswith("torch.arange({1}, {1} + {2}.shape[1]") and positions.operands[1] is emitter.start
    assert emit_query_positions(emitter) is positions.results[0]


def test_key_positions_are_emitted_once() -> None:
    emitter = emitter_of(graph_of())
    assert emit_key_positions(emitter) is emit_key_positions(emitter)
    rolling = emit_rolling_positions(emitter, 8, 2)
    assert emitter.program.statements[-1].text == "rolling_positions({0}, {1}, {2}, 8, 2)"
    assert emit_rolling_positions(emitter, 8, 2) is rolling is not emit_rolling_positions(emitter, 8, 0)


def test_cache_is_advanced_if_no_statement_reads_its_length() -> None:
    emitter = emitter_of(graph_of())
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
    (node,) = (n for n in graph_of(**options).nodes if n.op.name == "attention")
    assert find_rolling_capacity(node) == capacity

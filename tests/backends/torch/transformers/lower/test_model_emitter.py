"""The emitter for transformers: arguments, caches of layers, and weights that layers share."""

from __future__ import annotations

import pytest

from weft.backends.torch.transformers.lower.model_emitter import (
    find_cross_attentions,
    find_param,
    get_first_operand,
    has_shared_weights,
    is_only_embedded,
)
from weft.ir import Graph, TensorType, ops
from weft.ir.recipes import Normal
from weft.ir.types import dtypes

from ..tiny import base_of, graph_of


@pytest.fixture
def graph() -> Graph:
    """Return a graph of two linear maps, each in a scope of its own."""
    graph = Graph("maps")
    x = graph.add_input("x", TensorType(dtypes.f32, (2, 4)))
    for i in range(2):
        weight = graph.add_param(f"maps.{i}.weight", TensorType(dtypes.f32, (4, 4)), Normal((4, 4), 0.5, str(i)))
        with graph.scope(f"maps.{i}"):
            x = ops.exp(ops.linear(x, weight))
    graph.add_output("y", x)
    return graph


def test_arguments_of_decoders_and_encoders() -> None:
    decoder, encoder = (list(base_of(name).lowered.emitter.arguments) for name in ("dense", "encoder"))
    assert set(decoder) - set(encoder) == {"past_key_values", "use_cache"}
    assert "inputs_embeds" in encoder and "encoder_hidden_states" not in decoder
    assert all(v.default == "None" for v in base_of("dense").lowered.emitter.arguments.values())


def test_states_have_indices_within_their_layer() -> None:
    e = base_of("mamba").lowered.emitter
    assert [[*places.values()] for places in e.states.values()] == [[(0, 1), (1, 1)]] * 2
    assert list(e.recurrent.values()) == [0, 1, 0, 1]
    texts = [s.text for s in e.recurrent]
    assert texts[0].startswith("keep_states({3}, {4}, causal_conv_from(past_states({3}, {4})")
    assert "past_states(" in texts[1] and texts[1].endswith(", 1)")


def test_only_key_caches_count_tokens() -> None:
    counting = {name: base_of(name).lowered.emitter.has_counting_cache for name in ("dense", "mamba")}
    assert counting == {"dense": True, "mamba": False}
    assert any("count_tokens" in s.text for s in base_of("mamba").lowered.base.statements)


def test_rope_frequencies_read_the_config() -> None:
    texts = [s.text for s in base_of("dense").lowered.base.statements]
    assert texts.count("rope_frequencies(config.head_dim, config.rope_theta, {0}.device)") == 1


def test_first_parameter_is_found_within_the_scope(graph: Graph) -> None:
    y = graph.outputs["y"]
    assert find_param(y) is graph.params["maps.1.weight"]
    first, *_, last = graph.nodes
    assert find_param(get_first_operand(first)) is graph.inputs["x"]
    assert get_first_operand(last).producer is not None


def test_weights_of_repeated_layers_are_shared(graph: Graph) -> None:
    assert not has_shared_weights(graph, set(graph.nodes))
    x = graph.inputs["x"]
    with graph.scope("maps.0"):
        again = ops.exp(ops.linear(x, graph.params["maps.0.weight"]))
    graph.add_output("again", again)
    assert has_shared_weights(graph, {n for n in graph.nodes if n.op is ops.exp})
    assert not has_shared_weights(graph, set())


def test_token_ids_with_one_embedding_are_only_embedded() -> None:
    graph = graph_of("dense").clone()
    ids = graph.inputs["input_ids"]
    assert is_only_embedded(graph, ids)
    graph.add_output("more", ops.embedding(ids, graph.params["lm_head.weight"]))
    assert not is_only_embedded(graph, ids)


def test_decoders_without_encoder_have_no_cross_attention() -> None:
    assert find_cross_attentions(graph_of("dense")) == set()

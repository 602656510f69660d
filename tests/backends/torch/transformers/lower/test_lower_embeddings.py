"""Embeddings that callers may replace, activations as modules, and positions."""

from __future__ import annotations

import pytest

from weft import MLP, Attention, Block, Decoder, Encoder, GatedMLP, LearnedPositions, RMSNorm
from weft.backends.torch.program.statements import Submodule
from weft.backends.torch.transformers.lower.lower_base_and_head import LoweredModel, lower_sides
from weft.ir import Graph

from .....lowered import forms
from ..tiny import base_of


def lower(graph: Graph) -> LoweredModel:
    return lower_sides(forms(graph, "transformers"))[0]


def modules(lowered: LoweredModel) -> dict[str, str]:
    return {o.path: o.init for s in lowered.base.statements for o in s.operands if isinstance(o, Submodule)}


def test_token_embedding_is_the_default_of_inputs_embeds() -> None:
    lowered = base_of("dense").lowered
    statement = next(s for s in lowered.base.statements if s.results == (lowered.emitter.embeds,))
    assert statement.text == "{2}({1}) if {0} is None else {0}" and statement.early
    assert modules(lowered)["embed_tokens"] == "nn.Embedding(config.vocab_size, config.hidden_size)"


def test_scaled_embedding_is_one_module() -> None:
    graph = Decoder(60, 32, 1, Block(Attention(4), GatedMLP(48), RMSNorm()), embed_scale=4.0).graph()
    lowered = lower(graph)
    assert modules(lowered)["embed_tokens"].startswith("ScaledEmbedding(config.vocab_size, config.hidden_size, ")
    assert lowered.emitter.scaling is not None


@pytest.mark.parametrize(
    ("activation", "module"),
    [("silu", "nn.SiLU()"), ("gelu_tanh", 'nn.GELU(approximate="tanh")'), ("relu", "nn.ReLU()")],
)
def test_activations_are_modules(activation: str, module: str) -> None:
    for feed_forward in (GatedMLP(48, activation=activation), MLP(48, activation=activation)):
        graph = Decoder(60, 32, 1, Block(Attention(4), feed_forward, RMSNorm())).graph()
        assert modules(lower(graph))["layers.0.ffn.act"] == module


def test_alibi_and_its_distances_are_computed_once() -> None:
    texts = [s.text for s in base_of("alibi").lowered.base.statements]
    assert (texts.count("alibi({0}, {1})"), texts.count("key_distances({0}, {1})")) == (1, 1)


def test_positions_of_an_encoder_may_be_passed() -> None:
    block = Block(Attention(4, causal=False), GatedMLP(48), RMSNorm())
    lowered = lower(Encoder(60, 32, 1, block, positions=LearnedPositions(20)).graph())
    e = lowered.emitter
    reading = [s for s in lowered.base.statements if e.positions in s.operands and not s.early]
    assert reading and not any("arange" in s.text for s in reading)

"""Settings of a decoder inferred from its graph."""

from __future__ import annotations

import pytest

from weft.frontends.dsl import Attention, Block, Decoder, GatedMLP, Mamba, MoE, RMSNorm, RoPE
from weft.frontends.dsl.blocks import ARRANGEMENTS
from weft.frontends.export.infer_settings import infer_settings, propose_settings
from weft.frontends.model import Model
from weft.ir import Graph, WeftError
from weft.passes.forms import canonicalize

from .graphs import SETTINGS, decoder


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arrangement_is_inferred(arrangement: str) -> None:
    assert infer_settings(canonicalize(decoder(block={"arrangement": arrangement}))).arrangement == arrangement


def test_settings_are_inferred() -> None:
    graph = decoder(attention={"window": 5, "softcap": 3.0, "qk_norm": RMSNorm()}, block={"arrangement": "sandwich"})
    found = infer_settings(canonicalize(graph))
    assert (found.window, found.softcap, found.qk_norm, found.arrangement) == (5, 3.0, "head", "sandwich")
    assert (found.heads, found.kv_heads, found.head_dim, found.ffn, found.dim) == (4, 2, 4, 24, 16)


def test_biases_experts_and_ends_are_inferred() -> None:
    graph = decoder(attention={"qkv_bias": True}, ffn=MoE(4, 12, 2), embed_scale=4.0, tie_embeddings=True)
    settings = infer_settings(canonicalize(graph))
    assert (settings.qkv_bias, settings.out_bias, settings.embed_scale, settings.tie) == (True, False, 4.0, True)
    assert (settings.moe.experts, settings.moe.hidden, settings.moe.k) == (4, 12, 2)
    assert (settings.vocab, settings.layers, settings.norm, settings.eps) == (17, 2, "rms", 1e-6)


def test_settings_that_differ_by_layer_are_tuples() -> None:
    blocks = [Block(Attention(4, window=w, rope=RoPE()), GatedMLP(24), RMSNorm()) for w in (None, 5)]
    settings = infer_settings(canonicalize(Decoder(17, 16, blocks).graph()))
    assert settings.window == (None, 5) and settings.rope.theta == 10_000.0


def test_graphs_that_are_no_decoders_with_attention_are_refused() -> None:
    with pytest.raises(WeftError, match="the graph has no softmax attention"):
        infer_settings(Decoder(17, 16, 1, Block(Mamba(32), norm=RMSNorm())).graph())
    with pytest.raises(WeftError, match="the graph has no output logits, which a decoder needs"):
        infer_settings(Graph())


def test_families_are_proposed_with_the_settings_of_the_source_first() -> None:
    graph = canonicalize(decoder())
    model = Model(graph, "spec", "a model", settings=SETTINGS)
    pairs = list(propose_settings(model, graph, "qwen2", ["llama", "qwen2"]))
    assert [name for name, _ in pairs] == ["qwen2", "llama", "qwen2"]
    assert [settings.context for _, settings in pairs] == [64, None, None]  # the graph states no context
    assert pairs[1][1] == pairs[2][1] == infer_settings(graph)
    assert [name for name, _ in propose_settings(model, graph, "gpt2", ["llama"])] == ["llama"]

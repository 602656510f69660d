"""ModernBERT, EuroBERT, RoFormer, NomicBERT, Jina Embeddings 3, GTE: windows, bases, packed layers."""

from __future__ import annotations

import numpy as np

from weft.frontends.models.families import FAMILIES

from ..tables import counting, names, read, refusal, weight


def test_eurobert_is_llama_without_the_causal_mask() -> None:
    assert (read("eurobert").kind, read("eurobert").eps) == ("encoder", 1e-5)


def test_modernbert_is_global_in_every_third_layer() -> None:
    s = read("modernbert", local_attention=8)
    assert s.window == (None, 5, 5, None)
    assert [rope.theta for rope in s.rope] == [160_000, 10_000, 10_000, 160_000]
    assert s.arrangement == ("pre_ffn", "pre", "pre", "pre")
    assert read("modernbert", local_attention=8, global_attn_every_n_layers=2).window == (None, 5, None, 5)


def test_modernbert_decoder_window_includes_the_token() -> None:
    s = read("modernbert-decoder", local_attention=8)
    assert (s.kind, s.window) == ("decoder", (None, 4, 4, None))
    assert s.head_bias and s.head_transform is not None


def test_modernbert_packs_gate_and_up() -> None:
    packed = counting(96, 32)
    stored = {"layers.0.mlp.Wi.weight": packed}
    np.testing.assert_array_equal(weight("modernbert", "layers.0.ffn.gate.weight", stored), packed[:48])
    np.testing.assert_array_equal(weight("modernbert", "layers.0.ffn.up.weight", stored), packed[48:])


def test_modernbert_files_list_local_layers_or_a_period() -> None:
    rule = FAMILIES["modernbert"].gguf.settings["window"]
    assert rule({"block_count": 4}) is None
    assert rule({"block_count": 4, "attention.sliding_window": 8}) == (None, 5, 5, None)
    listed = {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False]}
    assert rule({"block_count": 2, **listed}) == (5, None)


def test_roformer_rotates_interleaved_pairs_but_not_values() -> None:
    s = read("roformer", embedding_size=32)
    assert (s.rope.interleaved, s.learned_positions, s.embed_dim) == (True, None, None)
    assert "rotary_value=True is not supported" in refusal("roformer", rotary_value=True)


def test_nomic_bert_is_gated_and_names_gate_after_up() -> None:
    s = read("nomic_bert")
    assert (s.rope.theta, s.gated, s.activation, s.qkv_bias, s.context) == (1000.0, True, "silu", False, 64)
    assert names("nomic_bert", "layers.0.ffn.gate.weight") == ["nomic_bert.encoder.layers.0.mlp.fc12.weight"]
    assert (read("jina_embeddings_v3").gated, read("jina_embeddings_v3").rope.theta) == (False, 20_000.0)


def test_gte_stores_up_above_gate_without_their_biases() -> None:
    packed = counting(96, 32)
    stored = {"new.encoder.layer.0.mlp.up_gate_proj.weight": packed}
    np.testing.assert_array_equal(weight("gte", "layers.0.ffn.up.weight", stored), packed[:48])
    np.testing.assert_array_equal(weight("gte", "layers.0.ffn.gate.weight", stored), packed[48:])
    np.testing.assert_array_equal(weight("gte", "layers.0.ffn.gate.bias", {}), np.zeros(48))

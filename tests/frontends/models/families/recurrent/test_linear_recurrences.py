"""MiniMax, RecurrentGemma, RWKV-4 and xLSTM: kinds of layers, decays, block-diagonal gates, widths."""

from __future__ import annotations

import numpy as np
import pytest

from weft.frontends.dsl import LightningAttention

from ..tables import ABSENT, counting, names, read, refusal, weight

MINIMAX = {"num_local_experts": 2, "num_experts_per_tok": 1}


def test_minimax_alternates_full_and_lightning_attention() -> None:
    blocks = read("minimax", **MINIMAX, full_attn_alpha_factor=3.0, mlp_beta_factor=2.0).block
    assert [isinstance(block.attn, LightningAttention) for block in blocks] == [False, True, False, True]
    assert (blocks[0].attn_scales, blocks[1].attn_scales, blocks[0].ffn_scales) == ((3.0, 1.0), (1.0, 1.0), (1.0, 2.0))


def test_minimax_decay_falls_with_depth() -> None:
    blocks = read("minimax", **MINIMAX).block
    assert [blocks[i].attn.decay for i in (1, 3)] == pytest.approx([2 / 3, 0.0], abs=1e-4)


def test_minimax_lightning_attention_fuses_queries_keys_and_values_per_head() -> None:
    stored = counting(96, 32)
    tensors = {"model.layers.1.self_attn.qkv_proj.weight": stored}
    found = weight("minimax", "layers.1.attn.v.weight", tensors, **MINIMAX)
    np.testing.assert_array_equal(found, stored.reshape(4, 3, 8, 32)[:, 2].reshape(32, 32))
    assert names("minimax", "layers.0.attn.v.weight", **MINIMAX) == ["model.layers.0.self_attn.v_proj.weight"]


def test_recurrent_gemma_attends_in_every_third_layer() -> None:
    s = read("recurrent_gemma")
    assert [mixer is None for mixer in s.mixer] == [False, False, True, False]
    assert (s.ffn, s.window, s.logit_softcap, s.rope.fraction) == (24, 2048, 30.0, 0.5)
    s = read("recurrent_gemma", block_types=["attention", "recurrent"], lru_width=16)
    assert [mixer and mixer.width for mixer in s.mixer] == [None, 16, None, 16]


def test_recurrent_gemma_embedding_scale_is_a_bfloat16() -> None:
    assert read("recurrent_gemma", hidden_size=2560).embed_scale == 50.5  # √2560 = 50.596…
    assert read("recurrent_gemma", hidden_size=64).embed_scale == 8.0


def test_recurrent_gemma_gates_are_stored_per_head() -> None:
    at, stored = "model.layers.0.temporal_block.rg_lru.input_gate", counting(4, 8, 8)
    found = weight("recurrent_gemma", "layers.0.attn.input.weight", {f"{at}_weight": stored})
    np.testing.assert_array_equal(found, stored.swapaxes(1, 2).reshape(32, 8))
    found = weight("recurrent_gemma", "layers.0.attn.input.bias", {f"{at}_bias": counting(4, 8)})
    np.testing.assert_array_equal(found, counting(32))


def test_rwkv_widths_follow_the_model() -> None:
    s = read("rwkv", intermediate_size=ABSENT)
    assert (s.mixer.width, s.moe.hidden, s.embed_norm, s.heads) == (32, 128, True, None)
    assert read("rwkv", attention_hidden_size=16).mixer.width == 16
    stored = {"rwkv.blocks.1.attention.time_mix_key": counting(1, 1, 32)}
    np.testing.assert_array_equal(weight("rwkv", "layers.1.attn.k.mix", stored), counting(32))
    assert "layer_norm_epsilon=1e-06 is not supported" in refusal("rwkv", layer_norm_epsilon=1e-6)


def test_xlstm_widths_are_rounded_up_to_a_multiple() -> None:
    s = read("xlstm")
    assert (s.ffn, s.tie, s.logit_softcap) == (128, False, 30.0)  # 2.667 · 32 = 85.3
    assert read("xlstm", ffn_round_up_to_multiple_of=8).ffn == 88
    assert (s.mixer.qk_dim, s.mixer.v_dim, s.mixer.cap) == (16, 32, 15.0)
    assert "use_bias=True is not supported" in refusal("xlstm", use_bias=True)

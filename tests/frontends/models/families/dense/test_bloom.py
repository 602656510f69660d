"""BLOOM, Falcon and MPT: ALiBi or RoPE, packed queries, keys and values."""

from __future__ import annotations

import numpy as np
import pytest

from ..tables import SIZES, counting, names, read, refusal, weight

MPT = {"d_model": 32, "n_layers": 4, "n_heads": 4}


def test_bloom_has_alibi_a_norm_of_embeddings_and_four_times_the_width() -> None:
    s = read("bloom", num_hidden_layers=2, num_attention_heads=8)
    assert (s.layers, s.heads, s.ffn, s.embed_norm, s.rope, s.tie) == (2, 8, 4 * 32, True, None, True)
    assert s.bias is not None
    assert s.qkv_bias and s.out_bias and s.ffn_bias


def test_bloom_packs_queries_keys_and_values_per_head() -> None:
    packed = counting(3 * 32, 32)
    stored = {"transformer.h.1.self_attention.query_key_value.weight": packed}
    by_head = packed.reshape(4, 3, 8, 32)
    for i, x in enumerate("qkv"):
        found = weight("bloom", f"layers.1.attn.{x}.weight", stored)
        np.testing.assert_array_equal(found, by_head[:, i].reshape(32, 32))


@pytest.mark.parametrize(
    ("config", "arrangement"),
    [
        ({}, "parallel"),
        ({"parallel_attn": False}, "pre"),
        ({"new_decoder_architecture": True}, "parallel_norms"),
        ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}, "parallel"),
    ],
)
def test_falcon_arrangement_follows_its_architecture(config: dict[str, object], arrangement: str) -> None:
    assert read("falcon", **config).arrangement == arrangement


def test_falcon_kv_heads() -> None:
    assert read("falcon", num_kv_heads=2).kv_heads == 1  # multi_query, whatever num_kv_heads states
    assert read("falcon", num_kv_heads=2, multi_query=False).kv_heads == 2
    assert read("falcon", num_kv_heads=2, new_decoder_architecture=True).kv_heads == 2


def test_falcon_scales_alibi_or_rotates() -> None:
    biased, rotated = read("falcon", alibi=True), read("falcon")
    assert (biased.rope, biased.bias.scale) == (None, pytest.approx(8**-0.5))
    assert rotated.bias is None and rotated.rope is not None


def test_falcon_norm_names_depend_on_the_arrangement() -> None:
    for config, name in (
        ({"parallel_attn": False}, "transformer.h.0.input_layernorm.weight"),
        ({"new_decoder_architecture": True}, "transformer.h.0.ln_attn.weight"),
    ):
        assert names("falcon", "layers.0.attn_norm.weight", **config) == [name]


def test_mpt_reads_clip_and_scale_from_attn_config() -> None:
    s = read("mpt", **MPT, attn_config={"clip_qkv": 8.0, "softmax_scale": 0.5})
    assert (s.clip, s.scale, s.norm_bias, s.qkv_bias) == (8.0, 0.5, False, False)
    assert (read("mpt", **MPT).clip, read("mpt", **MPT).ffn) == (None, 128)


@pytest.mark.parametrize(
    ("family", "config", "key"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm=True"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi=False"),
        ("mpt", {"no_bias": False}, "no_bias=False"),
    ],
)
def test_refusals_name_the_key(family: str, config: dict[str, object], key: str) -> None:
    assert refusal(family, **(SIZES | MPT | config)).startswith(f"config.json: {key} is not supported for {family}")

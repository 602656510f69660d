"""Llama and its first relatives: names, windows, norms of queries and keys, packed projections, layers without RoPE."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.models.families.dense.llama import alternate_windows, pick_windows

from ..tables import SIZES, counting, names, read, refusal, weight


def test_defaults_of_llama() -> None:
    s = read("llama")
    assert (s.dim, s.layers, s.heads, s.kv_heads, s.ffn) == (32, 4, 4, None, 48)
    assert (s.activation, s.eps, s.tie, s.qkv_bias, s.ffn_bias, s.rope.theta) == (
        "silu",
        1e-6,
        False,
        False,
        False,
        1e4,
    )
    assert s.context == 64


@pytest.mark.parametrize(
    ("parameter", "name"),
    [
        ("embed.weight", "model.embed_tokens.weight"),
        ("layers.3.attn.k.weight", "model.layers.3.self_attn.k_proj.weight"),
        ("layers.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
        ("layers.3.ffn.gate.weight", "model.layers.3.mlp.gate_proj.weight"),
        ("final_norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_of_llama(parameter: str, name: str) -> None:
    assert names("llama", parameter) == [name]


def test_a_missing_key_is_named() -> None:
    config = {**SIZES, "hidden_size": None}
    assert refusal("llama", **config) == "config.json: key 'hidden_size' is missing (for dim of llama models)"


def test_pick_windows_prefers_layer_types() -> None:
    types = ["full_attention", "sliding_attention"]
    assert pick_windows({}, 8, types) == (None, 8)
    assert pick_windows({"layer_types": types[::-1]}, 8, types) == (8, None)


@pytest.mark.parametrize(
    ("options", "config", "windows"),
    [
        ({"every": 2}, {}, (4096, None, 4096, None)),
        ({"every": 2, "first_global": True, "window": 8}, {}, (None, 8, None, 8)),
        ({"every": 2, "period": "p"}, {"p": 4, "sliding_window": 6}, (6, 6, 6, None)),
    ],
)
def test_alternate_windows(options: dict[str, Any], config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert alternate_windows(**options)({"num_hidden_layers": 4, **config}) == windows


def test_qwen2_windows_need_a_flag_and_start_late() -> None:
    assert read("qwen2", sliding_window=8).window is None
    assert read("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=3).window == (None, None, None, 8)
    assert read("qwen2").qkv_bias and not read("qwen2").out_bias
    assert (read("qwen3").qk_norm, read("qwen3").head_dim) == ("head", 128)


def test_olmo2_normalizes_after_sublayers() -> None:
    assert (read("olmo2").arrangement, read("olmo2").qk_norm, read("olmo").norm_weight) == (
        "post_sublayer",
        "full",
        False,
    )
    assert names("olmo2", "layers.0.ffn_post_norm.weight") == ["model.layers.0.post_feedforward_layernorm.weight"]


def test_granite_scales_with_its_multipliers() -> None:
    s = read(
        "granite", embedding_multiplier=12.0, attention_multiplier=0.5, residual_multiplier=0.2, logits_scaling=8.0
    )
    assert (s.embed_scale, s.scale, s.residual_scale, s.logit_scale) == (12.0, 0.5, 0.2, 1 / 8)


def test_smollm3_leaves_every_fourth_layer_without_rope() -> None:
    assert [rope is not None for rope in read("smollm3").rope] == [True, True, True, False]
    assert [rope is not None for rope in read("smollm3", no_rope_layers=[0, 1, 1, 0]).rope] == [
        False,
        True,
        True,
        False,
    ]


def test_phi3_splits_packed_projections() -> None:
    packed, both = counting(96, 32), counting(96, 32)
    at = "model.layers.0"
    found = weight("phi3", "layers.0.attn.k.weight", {f"{at}.self_attn.qkv_proj.weight": packed})
    np.testing.assert_array_equal(found, packed[32:64])
    found = weight("phi3", "layers.0.ffn.up.weight", {f"{at}.mlp.gate_up_proj.weight": both})
    np.testing.assert_array_equal(found, both[48:])


def test_stablelm_concatenates_the_norms_of_heads() -> None:
    stored = {f"model.layers.0.self_attn.q_layernorm.norms.{h}.weight": np.full(8, h) for h in range(4)}
    found = weight("stablelm", "layers.0.attn.q_norm.weight", stored, qk_layernorm=True)
    np.testing.assert_array_equal(found, np.repeat(np.arange(4), 8))
    assert read("stablelm", use_parallel_residual=True).arrangement == "parallel"
    assert read("stablelm").rope.fraction == 0.25


def test_cohere_scales_logits_and_interleaves_rope() -> None:
    s = read("cohere", use_qk_norm=True)
    assert (s.logit_scale, s.rope.interleaved, s.norm_bias, s.qk_norm, s.arrangement) == (
        0.0625, True, False, "each", "parallel",
    )  # fmt: skip


def test_bitnet_normalizes_before_the_last_layers_of_sublayers() -> None:
    assert (read("bitnet").sub_norm, read("bitnet").activation, read("bitnet").kv_heads) == (True, "relu2", 5)
    assert names("bitnet", "layers.0.ffn.sub_norm.weight") == ["model.layers.0.mlp.ffn_sub_norm.weight"]

"""GPT-Neo, GPT-J, GPT-NeoX and Phi: windows, partial RoPE and parallel blocks."""

from __future__ import annotations

from typing import Any

import pytest

from ..tables import names, read, refusal

GPTJ = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}


def test_gpt_neo_windows_follow_attention_types() -> None:
    sizes = {"num_layers": 4, "num_heads": 4}
    assert read("gpt_neo", **sizes, attention_types=[[["global", "local"], 2]]).window == (None, 256, None, 256)
    layers = ["local", "global", "global", "local"]
    assert read("gpt_neo", **sizes, attention_layers=layers, window_size=8).window == (8, None, None, 8)
    assert read("gpt_neo", **sizes).scale == 1.0


def test_gptj_rotates_interleaved_pairs_in_part_of_each_head() -> None:
    s = read("gptj", **GPTJ, rotary_dim=4)
    assert (s.rope.dim, s.rope.interleaved, s.arrangement, s.head_bias) == (4, True, "parallel", True)
    assert read("gptj", **GPTJ).rope.dim == 64
    assert names("gptj", "layers.3.ffn.down.weight", **GPTJ) == ["transformer.h.3.mlp.fc_out.weight"]


def test_gpt_neox_rotates_a_quarter_unless_stated() -> None:
    assert read("gpt_neox").rope.fraction == 0.25
    s = read("gpt_neox", rotary_pct=0.5, rotary_emb_base=20_000)
    assert (s.rope.fraction, s.rope.theta) == (0.5, 20_000)


def test_gpt_neox_residual_is_parallel_by_default() -> None:
    assert read("gpt_neox").arrangement == "parallel_norms"
    assert read("gpt_neox", use_parallel_residual=False).arrangement == "pre"


def test_gpt_neox_refuses_another_head_dim() -> None:
    assert "head_dim=16" in refusal("gpt_neox", head_dim=16)


def test_gpt_neox_japanese_has_an_output_bias_in_the_last_layer_only() -> None:
    s = read("gpt_neox_japanese", intermediate_multiple_size=3)
    assert (s.out_bias, s.ffn, s.rope.fraction) == ((False, False, False, True), 96, 1.0)
    bias = names("gpt_neox_japanese", "layers.3.attn.o.bias", keys=["gpt_neox_japanese.layers.3.attention.dense_bias"])
    assert bias == ["gpt_neox_japanese.layers.3.attention.dense_bias"]


@pytest.mark.parametrize(("config", "norm"), [({}, "none"), ({"qk_layernorm": True}, "head")])
def test_phi_normalizes_queries_and_keys_if_stated(config: dict[str, Any], norm: str) -> None:
    s = read("phi", **config)
    assert (s.qk_norm, s.arrangement, s.rope.fraction) == (norm, "parallel", 0.5)
    assert names("phi", "layers.0.norm.weight") == ["model.layers.0.input_layernorm.weight"]

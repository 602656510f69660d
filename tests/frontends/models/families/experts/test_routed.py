"""Llama 4, DBRX, Phi-3.5-MoE, JetMoE, LongCat-Flash: layers with chunks, nested keys, order of experts' rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ..tables import ABSENT, counting, names, read, refusal, weight

LLAMA4 = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
DBRX: dict[str, Any] = {
    "d_model": 32,
    "n_layers": 4,
    "n_heads": 4,
    "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 2},
}
JET = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2, "kv_channels": 8}
LONGCAT = {
    "intermediate_size": ABSENT,
    **{"kv_lora_rank": 16, "q_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
    **{"n_routed_experts": 2, "expert_ffn_hidden_size": 24, "moe_topk": 1, "ffn_hidden_size": 40, "num_layers": 4},
}


def test_llama4_rotary_layers_have_chunks_and_norms_others_a_temperature() -> None:
    s = read("llama4_text", **LLAMA4, attention_chunk_size=8)
    assert [rope is not None for rope in s.rope] == [True, True, True, False]
    assert [mask and mask.stride for mask in s.mask] == [8, 8, 8, None]
    assert s.qk_norm == ("head", "head", "head", "none")
    assert [t is not None for t in s.temperature] == [False, False, False, True]
    assert read("llama4_text", **LLAMA4, attn_temperature_tuning=False).temperature == (None,) * 4
    assert read("llama4_text", **LLAMA4, use_qk_norm=False).qk_norm == ("none",) * 4


def test_llama4_layers_with_experts() -> None:
    for config, wanted in (
        ({}, [True] * 4),
        ({"interleave_moe_layer_step": 2}, [False, True, False, True]),
        ({"moe_layers": [0]}, [True, False, False, False]),
    ):
        assert [moe is not None for moe in read("llama4_text", **LLAMA4, **config).moe] == wanted
    moe = read("llama4_text", **LLAMA4).moe[0]
    assert moe.weigh_input and moe.router.scoring == "sigmoid" and moe.shared.hidden == 48


def test_llama4_experts_are_stored_transposed() -> None:
    stored = counting(2, 32, 96)
    tensors = {"model.layers.0.feed_forward.experts.gate_up_proj": stored}
    found = weight("llama4_text", "layers.0.ffn.experts.up", tensors, **LLAMA4)
    np.testing.assert_array_equal(found, stored[:, :, 48:].swapaxes(1, 2))


def test_dbrx_keys_are_nested() -> None:
    s = read("dbrx", **DBRX, attn_config={"kv_n_heads": 2, "clip_qkv": 8.0})
    assert (s.kv_heads, s.clip, s.moe.experts, s.moe.hidden, s.moe.k) == (2, 8.0, 2, 24, 1)
    assert "attn_config=[1] is not a mapping" in refusal("dbrx", **DBRX, attn_config=[1])
    stored = counting(48, 32)
    found = weight("dbrx", "layers.0.ffn.experts.down", {"transformer.blocks.0.ffn.experts.mlp.w2": stored}, **DBRX)
    np.testing.assert_array_equal(found, stored.reshape(2, 24, 32).swapaxes(1, 2))


def test_phimoe_scales_rope_by_short_mscale() -> None:
    config = {"num_local_experts": 2, "num_experts_per_tok": 2}
    assert read("phimoe", **config).rope.theta == 1e6
    assert read("phimoe", **config, router_jitter_noise=0.5).moe.router.jitter == 0.5
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", **factors, "short_mscale": 1.25, "rope_theta": 1e4}
    assert read("phimoe", **config, rope_parameters=rope).rope.amplitude == 1.25


def test_jetmoe_orders_rows_and_columns_by_kv_head() -> None:
    rows, columns = counting(2, 16, 32), counting(2, 32, 16)  # [experts, kv_heads · d, dim]
    at = "model.layers.0.self_attention.experts"
    found = weight("jetmoe", "layers.0.attn.q.weight", {f"{at}.input_linear.weight": rows}, **JET)
    np.testing.assert_array_equal(found, rows.reshape(2, 2, 8, 32).swapaxes(0, 1).reshape(32, 32))
    found = weight("jetmoe", "layers.0.attn.o.weight", {f"{at}.output_linear.weight": columns}, **JET)
    wanted = [columns[expert][:, 8 * head : 8 * head + 8] for head in range(2) for expert in range(2)]
    np.testing.assert_array_equal(found, np.concatenate(wanted, axis=1))


def test_jetmoe_packs_keys_above_values() -> None:
    stored = {"model.layers.0.self_attention.kv_proj.weight": counting(32, 32)}
    np.testing.assert_array_equal(weight("jetmoe", "layers.0.attn.v.weight", stored, **JET), counting(32, 32)[16:])
    assert "rms_norm_eps=1e-05 is not supported" in refusal("jetmoe", **JET, rms_norm_eps=1e-5)


@pytest.mark.parametrize(("parameter", "name", "rank"), [("q_up", "q_b_proj", 8), ("kv_norm", "kv_a_layernorm", 16)])
def test_longcat_scales_latents_by_the_root_of_their_share(parameter: str, name: str, rank: int) -> None:
    stored = counting(4)
    tensors = {f"model.layers.2.self_attn.1.{name}.weight": stored}
    found = weight("longcat_flash", f"layers.2.second.attn.{parameter}.weight", tensors, **LONGCAT)
    np.testing.assert_allclose(found, stored * math.sqrt(32 / rank), rtol=1e-6)


def test_longcat_has_two_attentions_per_layer_and_zero_experts() -> None:
    s = read("longcat_flash", **LONGCAT, zero_expert_num=3)
    router = s.block.moe.router
    assert (router.zero_experts, router.scale, router.renormalize, s.block.ffn.hidden) == (3, 6.0, False, 40)
    assert names("longcat_flash", "layers.0.first.ffn.up.weight", **LONGCAT) == ["model.layers.0.mlps.0.up_proj.weight"]

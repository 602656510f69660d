"""Qwen3-Next and Qwen 3.5: layers with the delta rule, projections fused per head or per group, reordered files."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.frontends.models.families import FAMILIES

from ..tables import counting, evaluate, names, read, refusal, weight

DELTA: dict[str, Any] = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 6},
    **{"head_dim": 8, "num_key_value_heads": 2, "num_experts": 0},
}


def test_every_fourth_layer_attends() -> None:
    assert [mixer is None for mixer in read("qwen3_next", **DELTA).mixer] == [False, False, False, True]
    halves = read("qwen3_next", **DELTA, full_attention_interval=2).mixer
    assert [mixer is None for mixer in halves] == [False, True, False, True]
    assert (halves[0].heads, halves[0].groups, halves[0].head_dim, halves[0].v_head_dim) == (4, 2, 4, 6)


def test_queries_and_gates_alternate_per_head() -> None:
    stored = counting(4 * 2 * 8, 32)
    by_head = stored.reshape(4, 2, 8, 32)
    tensors = {"model.layers.3.self_attn.q_proj.weight": stored}
    found = weight("qwen3_next", "layers.3.attn.q.weight", tensors, **DELTA)
    np.testing.assert_array_equal(found, by_head[:, 0].reshape(32, 32))
    found = weight("qwen3_next", "layers.3.attn.gate.weight", tensors, **DELTA)
    np.testing.assert_array_equal(found, by_head[:, 1].reshape(32, 32))


def test_delta_projections_are_fused_per_group() -> None:
    # Each of 2 groups: 4 rows of q, 4 of k, 2 heads · 6 of v, as many of the gate.
    stored = counting(2 * 32, 32)
    q, k, v, gate = np.split(stored.reshape(2, 32, 32), [4, 8, 20], axis=1)
    tensors = {"model.layers.0.linear_attn.in_proj_qkvz.weight": stored}
    found = weight("qwen3_next", "layers.0.attn.qkv.weight", tensors, **DELTA)
    np.testing.assert_array_equal(found, np.concatenate([x.reshape(-1, 32) for x in (q, k, v)]))
    found = weight("qwen3_next", "layers.0.attn.gate.weight", tensors, **DELTA)
    np.testing.assert_array_equal(found, gate.reshape(-1, 32))


def test_norms_multiply_by_one_plus_weight_except_the_delta_rules() -> None:
    found = weight(
        "qwen3_next", "layers.0.attn_norm.weight", {"model.layers.0.input_layernorm.weight": counting(32)}, **DELTA
    )
    np.testing.assert_array_equal(found, counting(32) + 1)
    found = weight(
        "qwen3_next", "layers.0.attn.norm.weight", {"model.layers.0.linear_attn.norm.weight": counting(6)}, **DELTA
    )
    np.testing.assert_array_equal(found, counting(6))


def test_experts_are_renormalized_unless_there_are_none() -> None:
    assert read("qwen3_next", **DELTA).moe is None
    config = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
    moe = read("qwen3_next", **DELTA | config, shared_expert_intermediate_size=16).moe[0]
    assert moe.router.renormalize and moe.shared_gate


def test_qwen3_5_stores_projections_separately() -> None:
    assert names("qwen3_5_text", "layers.0.attn.beta.weight", **DELTA) == [
        "model.layers.0.linear_attn.in_proj_b.weight"
    ]
    assert names("qwen3_5_text", "layers.0.attn.gate.weight", **DELTA) == [
        "model.layers.0.linear_attn.in_proj_z.weight"
    ]
    assert read("qwen3_5_text", **DELTA).moe is None


def test_files_order_value_heads_by_index_not_by_group() -> None:
    table = FAMILIES["qwen3_5_text"].gguf
    assert table is not None
    stored = {"blk.0.ssm_beta.weight": counting(4, 32)}  # heads (group, index): 00, 10, 01, 11
    recipe = table.recipe("layers.0.attn.beta.weight", read("qwen3_5_text", **DELTA), frozenset(stored))
    assert recipe is not None
    np.testing.assert_array_equal(evaluate(recipe, stored), counting(4, 32)[[0, 2, 1, 3]])


def test_refusals() -> None:
    assert "attention_bias=True is not supported" in refusal("qwen3_next", **DELTA, attention_bias=True)
    assert "hidden_act='gelu' is not supported" in refusal("qwen3_next", **DELTA, hidden_act="gelu")

"""OLMo Hybrid and Kimi Linear: layers with the delta rule, sizes by default, projections of q, k and v."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import MLA, GatedDeltaNet
from weft.frontends.models.families.recurrent.delta_hybrids import build_delta_rule, find_delta_rule, read_layer_kinds

from ..tables import counting, names, read, refusal, weight

LINEAR, FULL = "linear_attention", "full_attention"
KIMI: dict[str, Any] = {
    **{"kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "num_experts": 4},
    **{"num_experts_per_token": 2, "moe_intermediate_size": 24, "linear_attn_config": {"num_heads": 2, "head_dim": 4}},
}


def test_kinds_have_a_period_or_a_list() -> None:
    assert read_layer_kinds({"num_hidden_layers": 4}, 2) == [LINEAR, FULL, LINEAR, FULL]
    assert read_layer_kinds({"num_hidden_layers": 2, "layer_types": [FULL, LINEAR]}) == [FULL, LINEAR]


def test_delta_rule_sizes_and_defaults() -> None:
    assert build_delta_rule({}).widths == (16 * 128, 32 * 128)
    delta = build_delta_rule({"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_num_key_heads": 2})
    assert (delta.heads, delta.groups, delta.head_dim, delta.v_head_dim) == (4, 2, 8, 128)


def test_olmo_values_are_twice_as_wide_as_keys_which_have_three_quarters() -> None:
    delta = find_delta_rule(read("olmo_hybrid"))
    assert (delta.heads, delta.groups, delta.head_dim, delta.v_head_dim, delta.negative) == (4, 4, 6, 12, True)


def test_olmo_attends_in_the_last_layer_if_no_other_does() -> None:
    s = read("olmo_hybrid", layer_types=[LINEAR] * 4)
    assert [mixer is None for mixer in s.mixer] == [False, False, False, True]
    assert s.arrangement == ("pre", "pre", "pre", "post_sublayer")
    assert read("olmo_hybrid", rope_parameters={"rope_theta": None}).rope is None


def test_olmo_concatenates_projections_and_convolutions() -> None:
    keys, values = counting(24, 32), counting(48, 32)
    at = "model.layers.0.linear_attn"
    stored = {f"{at}.q_proj.weight": keys, f"{at}.k_proj.weight": keys + 1, f"{at}.v_proj.weight": values}
    found = weight("olmo_hybrid", "layers.0.attn.qkv.weight", stored)
    np.testing.assert_array_equal(found, np.concatenate([keys, keys + 1, values]))
    fused = {f"{at}.conv1d.weight": counting(96, 1, 4)}
    np.testing.assert_array_equal(weight("olmo_hybrid", "layers.0.attn.conv.weight", fused), counting(96, 4))


@pytest.mark.parametrize(
    ("config", "delta"),
    [
        ({}, [True, True, True, True]),
        ({"layer_types": [LINEAR, FULL, LINEAR, FULL]}, [True, False, True, False]),
        (
            {"linear_attn_config": {"num_heads": 2, "head_dim": 4, "kda_layers": [1, 4], "full_attn_layers": [2, 3]}},
            [True, False, False, True],
        ),
    ],
)
def test_kimi_counts_its_layers_from_one(config: dict[str, Any], delta: list[bool]) -> None:
    mixers = read("kimi_linear", **KIMI | config).mixer
    assert [isinstance(mixer, GatedDeltaNet) for mixer in mixers] == delta
    assert all(isinstance(mixer, GatedDeltaNet | MLA) for mixer in mixers)


def test_kimi_names_routing_keys_differently() -> None:
    moe = read("kimi_linear", **KIMI, moe_renormalize=False, num_expert_group=2).moe
    assert moe[0] is None  # one dense layer
    router = moe[1].router
    assert (moe[1].k, router.renormalize, router.groups, router.scale, moe[1].shared.hidden) == (2, False, 2, 2.446, 24)


def test_kimi_has_no_rope_and_never_ties() -> None:
    s = read("kimi_linear", **KIMI, tie_word_embeddings=True, model_max_length=32)
    assert (s.rope, s.tie, s.context) == (None, False, 32)
    found = weight(
        "kimi_linear", "layers.0.attn.a_log", {"model.layers.0.self_attn.A_log": counting(1, 1, 2, 1)}, **KIMI
    )
    np.testing.assert_array_equal(found, [0, 1])
    spelled = "model.layers.1.mlp.gate.weight"
    assert names("kimi_linear", "layers.1.ffn.router.weight", keys=[spelled], **KIMI) == [spelled]


def test_refusals() -> None:
    assert "hidden_act='gelu' is not supported" in refusal("olmo_hybrid", hidden_act="gelu")
    assert "attention_bias=True is not supported" in refusal("kimi_linear", **KIMI, attention_bias=True)

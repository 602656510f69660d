"""Cohere 2 MoE, MiMo-V2-Flash, Flint, Laguna: layers that differ in windows, heads, sinks and bases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..tables import counting, read, refusal, weight

MOE: dict[str, Any] = {
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "moe_intermediate_size": 24,
}


def test_cohere_dense_layers_have_their_own_period() -> None:
    config = {**MOE, "num_hidden_layers": 6, "first_k_dense_replace": 2, "sliding_window": 8}
    s = read("cohere2_moe", **config)
    assert s.window == (None, None, 8, 8, 8, None)
    assert [moe is not None for moe in s.moe] == [False, False, True, True, True, True]
    # Dense layers that the config makes global all have RoPE, later global layers none.
    assert [rope is not None for rope in s.rope] == [True, True, True, True, True, False]
    other = read("cohere2_moe", **config, prefix_dense_sliding_window_pattern=2)
    assert other.window[:2] == (8, None)
    assert [rope is not None for rope in other.rope[:2]] == [True, False]


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({}, 1.0),
        ({"num_shared_experts": 1}, 0.5),
        ({"num_shared_experts": 1, "shared_expert_combination_strategy": "sum"}, 1.0),
    ],
)
def test_cohere_averages_routed_and_shared_experts(config: dict[str, Any], factor: float) -> None:
    s = read("cohere2_moe", **MOE, **config)
    assert (s.multipliers["shared"], s.moe[0].router.scale) == (factor, factor)


def test_cohere_norm_follows_the_stated_epsilon() -> None:
    assert (read("cohere2_moe", **MOE).norm, read("cohere2_moe", **MOE, rms_norm_eps=1e-6).norm) == ("layer", "rms")


def test_mimo_local_layers_have_twice_the_kv_heads_and_sinks() -> None:
    s = read("mimo_v2_flash", **MOE, num_hidden_layers=6, num_key_value_heads=2)
    assert s.window == (None, 129, 129, 129, 129, None)
    assert s.kv_heads == (2, 4, 4, 4, 4, 2)
    assert s.sinks == (False, True, True, True, True, False)
    assert [rope.theta for rope in s.rope] == [5e6, 1e4, 1e4, 1e4, 1e4, 5e6]
    assert read("mimo_v2_flash", **MOE, sliding_window_size=8).window[1] == 9


@pytest.mark.parametrize(
    ("stated", "scale"), [({}, 0.707), ({"attention_value_scale": None}, 1.0), ({"attention_value_scale": 0.5}, 0.5)]
)
def test_mimo_scales_values(stated: dict[str, Any], scale: float) -> None:
    stored = counting(32, 32)
    found = weight(
        "mimo_v2_flash", "layers.0.attn.v.weight", {"model.layers.0.self_attn.v_proj.weight": stored}, **MOE, **stated
    )
    np.testing.assert_allclose(found, stored * scale, rtol=1e-6)


def test_flint_is_global_at_both_ends_and_in_every_fourth_layer() -> None:
    s = read("flint", **MOE, num_hidden_layers=8, sliding_window=8)
    assert s.window == (None, None, 8, 8, 8, None, 8, None)
    assert [rope is not None for rope in s.rope] == [window is not None for window in s.window]
    assert [moe is not None for moe in s.moe] == [False, False] + [True] * 6
    router = s.moe[-1].router
    assert (router.scoring, router.correction, router.scale, s.moe[-1].shared.hidden) == ("sigmoid", False, 1.0, 1024)


def test_laguna_heads_and_gates() -> None:
    s = read("laguna", **MOE, num_attention_heads_per_layer=[4, 8, 4, 8])
    assert s.heads == (4, 8, 4, 8)
    assert read("laguna", **MOE).heads == 4
    assert (s.gate.by_head, read("laguna", **MOE, gating="per-element").gate.by_head) == (True, False)
    assert [moe is not None for moe in s.moe] == [False, True, True, True]


def test_laguna_bases_follow_layer_types() -> None:
    types = ["full_attention", "sliding_attention"] * 2
    s = read("laguna", **MOE, layer_types=types, sliding_window=8)
    assert s.window == (None, 8, None, 8)
    assert [(rope.theta, rope.fraction) for rope in s.rope[:2]] == [(5e5, 0.5), (1e4, 1.0)]
    assert "moe_router_logit_softcapping=30.0 is not supported" in refusal(
        "laguna", **MOE, moe_router_logit_softcapping=30.0
    )

"""Mamba, Mamba-2 and hybrids: sizes, layers with a state space, stored convolutions and decay rates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from weft.frontends.models.families import FAMILIES
from weft.frontends.models.families.recurrent.mamba import convert_rates
from weft.frontends.models.tables.family import Fetch

from ..tables import ABSENT, counting, evaluate, names, read, refusal, weight

PLAIN: dict[str, Any] = {"intermediate_size": ABSENT}
BAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8}


def test_mamba_expands_the_width_and_derives_the_rank_of_steps() -> None:
    s = read("mamba", **PLAIN, expand=2, state_size=8)
    assert (s.mixer.inner, s.mixer.state, s.mixer.conv, s.mixer.dt_rank) == (64, 8, 4, None)
    assert read("mamba", **PLAIN, time_step_rank=3).mixer.dt_rank == 3
    assert (s.ffn, s.heads, s.tie, read("mamba2", **PLAIN, num_heads=8).tie) == (None, None, True, False)


def test_convolutions_lose_their_axis_of_size_one() -> None:
    stored = {"backbone.layers.1.mixer.conv1d.weight": counting(64, 1, 4)}
    np.testing.assert_array_equal(weight("mamba", "layers.1.attn.conv.weight", stored, **PLAIN), counting(64, 4))
    # Mamba-2 also convolves B and C, of 8 groups each.
    wide = {"backbone.layers.1.mixer.conv1d.weight": counting(64 + 2 * 8 * 4, 1, 4)}
    config = {**PLAIN, "num_heads": 8, "state_size": 4}
    np.testing.assert_array_equal(weight("mamba2", "layers.1.attn.conv.weight", wide, **config), counting(128, 4))


def test_falcon_mamba_normalizes_without_weights() -> None:
    assert read("falcon_mamba").mixer.norms.weight is False
    assert read("mamba").mixer.norms is None


def test_files_store_negative_rates_instead_of_their_logarithms() -> None:
    fetch = Fetch(frozenset(["blk.0.ssm_a"]), "", {}, "0")
    recipe = convert_rates(-1)(fetch, "", read("mamba"))
    np.testing.assert_allclose(evaluate(recipe, {"blk.0.ssm_a": [[-1.0], [-math.e]]}), [0.0, 1.0], atol=1e-6)


def test_jamba_alternates_attention_and_experts_by_periods() -> None:
    config = {"num_experts": 2, "num_experts_per_tok": 1}
    s = read("jamba", **config, num_hidden_layers=8)
    assert [mixer is None for mixer in s.mixer] == [i == 4 for i in range(8)]
    assert [moe is not None for moe in s.moe] == [i % 2 == 1 for i in range(8)]
    s = read("jamba", **config, attn_layer_period=2, attn_layer_offset=0, expert_layer_period=4, expert_layer_offset=0)
    assert [mixer is None for mixer in s.mixer] == [True, False, True, False]
    assert [moe is not None for moe in s.moe] == [True, False, False, False]
    assert read("jamba", num_experts=1, num_experts_per_tok=1).moe == (None,) * 4
    assert names("jamba", "layers.0.attn.b_norm.weight", **config) == ["model.layers.0.mamba.b_layernorm.weight"]


def test_bamba_attends_in_listed_layers_only() -> None:
    s = read("bamba", **BAMBA, attn_layer_indices=[2])
    assert [mixer is None for mixer in s.mixer] == [False, False, True, False]
    assert (s.mixer[0].heads, s.mixer[0].groups, s.rope.fraction) == (4, 1, 0.5)


def test_granite_hybrid_rotates_only_if_stated() -> None:
    config = {**BAMBA, "shared_intermediate_size": 16, "num_local_experts": 0, "num_experts_per_tok": 1}
    s = read("granitemoehybrid", **config, layer_types=["mamba", "attention"] * 2)
    assert [mixer is None for mixer in s.mixer] == [False, True, False, True]
    assert (s.rope, s.moe, s.ffn) == (None, None, 16)
    assert read("granitemoehybrid", **config, position_embedding_type="rope").rope is not None


def test_files_rotate_unless_marked_otherwise() -> None:
    rule = FAMILIES["granitemoehybrid"].gguf.settings["rope"]
    assert rule({"rope.scaling.finetuned": False}) is None
    assert rule({}) is not None


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "gelu"), ("time_step_limit", [0.0, 1.0])])
def test_refusals(key: str, value: Any) -> None:
    assert f"{key}={value!r} is not supported for mamba models" in refusal("mamba", **{key: value})
    assert read("mamba", time_step_limit=[0.0, math.inf]).dim == 32

"""LFM2, Falcon-H1 and Nemotron-H: kinds of layers, widths, multipliers folded into weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import Attention, Mamba2, ShortConv

from ..tables import counting, names, read, refusal, weight

FALCON: dict[str, Any] = {
    **{"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_state": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"ssm_multipliers": [1.0, 2.0, 3.0, 4.0, 5.0], "ssm_in_multiplier": 0.5, "key_multiplier": 4.0},
    **{"attention_in_multiplier": 2.0, "mlp_multipliers": [3.0, 0.25]},
}
NEMOTRON: dict[str, Any] = {
    **{
        "hybrid_override_pattern": "M*-E",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
    },
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "moe_shared_expert_intermediate_size": 40,
}


def test_lfm2_convolves_except_in_attention_layers() -> None:
    s = read("lfm2", full_attn_idxs=[1])
    assert [isinstance(mixer, ShortConv) for mixer in s.mixer] == [True, False, True, True]
    assert read("lfm2").mixer == (None,) * 4
    assert read("lfm2", layer_types=["conv", "full_attention"] * 2, conv_L_cache=5).mixer[0].conv == 5


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"block_auto_adjust_ff_dim": False}, 48),
        ({}, 256),  # 2/3 · 48 = 32, rounded up to a multiple of 256
        ({"block_multiple_of": 24}, 48),
        ({"block_multiple_of": 24, "block_ffn_dim_multiplier": 2.0}, 72),
        ({"block_ffn_dim_multiplier": None}, 32),
    ],
)
def test_lfm2_adjusts_the_width_of_feed_forwards(config: dict[str, Any], width: int) -> None:
    assert read("lfm2", **config).ffn == width


def test_lfm2_moe_has_dense_layers_first() -> None:
    config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    moe = read("lfm2_moe", **config).moe
    assert [m is not None for m in moe] == [False, False, True, True]
    assert (moe[3].router.scoring, moe[3].router.correction) == ("sigmoid", True)
    assert names("lfm2", "final_norm.weight") == ["model.embedding_norm.weight"]


def test_falcon_attends_in_parallel_to_its_state_space() -> None:
    mixer = read("falcon_h1", **FALCON).mixer
    assert isinstance(mixer.attention, Attention) and isinstance(mixer.ssm, Mamba2)
    assert (mixer.attention.kv_heads, mixer.ssm.inner, mixer.ssm.norm) == (2, 16, None)
    assert read("falcon_h1", **FALCON, mamba_rms_norm=True).mixer.ssm.norm is not None


def test_falcon_multiplies_rows_of_the_input_projection() -> None:
    stored = np.ones((16 + 16 + 4 + 4 + 2, 32))
    found = weight(
        "falcon_h1", "layers.0.attn.ssm.in.weight", {"model.layers.0.mamba.in_proj.weight": stored}, **FALCON
    )
    wanted = 0.5 * np.repeat([1.0, 2.0, 3.0, 4.0, 5.0], [16, 16, 4, 4, 2])
    np.testing.assert_allclose(found, np.tile(wanted[:, None], 32))


def test_falcon_folds_multipliers_into_weights_and_key_bias() -> None:
    at, stored = "model.layers.0.self_attn", counting(16, 32)
    found = weight("falcon_h1", "layers.0.attn.attention.k.weight", {f"{at}.k_proj.weight": stored}, **FALCON)
    np.testing.assert_array_equal(found, stored * 8)
    found = weight("falcon_h1", "layers.0.attn.attention.k.bias", {f"{at}.k_proj.bias": counting(16)}, **FALCON)
    np.testing.assert_array_equal(found, counting(16) * 4)
    stored = {"model.layers.0.feed_forward.down_proj.weight": counting(32, 48)}
    np.testing.assert_array_equal(
        weight("falcon_h1", "layers.0.ffn.down.weight", stored, **FALCON), counting(32, 48) / 4
    )


def test_nemotron_layers_are_letters() -> None:
    s = read("nemotron_h", **NEMOTRON)
    assert [type(mixer) for mixer in s.mixer] == [Mamba2, Attention, type(None), type(None)]
    assert s.ffn == (None, None, 48, None)
    assert [moe is not None for moe in s.moe] == [False, False, False, True]
    assert (s.moe[3].gated, s.moe[3].activation, s.moe[3].shared.hidden, s.tie) == (False, "relu2", 40, False)


def test_nemotron_refusals() -> None:
    assert "layer type 'X' is unknown; known are mamba, attention, mlp, moe" in refusal(
        "nemotron_h", **NEMOTRON | {"hybrid_override_pattern": "MX"}
    )
    message = "mlp_bias=True is not supported with moe_latent_size="
    assert message in refusal("nemotron_h", **NEMOTRON, mlp_bias=True, moe_latent_size=8)


def test_nemotron_experts_are_separate_tensors_or_one() -> None:
    at, ups = "backbone.layers.3.mixer.experts", counting(4, 24, 32)
    for stored in ({f"{at}.up_proj": ups}, {f"{at}.{e}.up_proj.weight": ups[e] for e in range(4)}):
        np.testing.assert_array_equal(weight("nemotron_h", "layers.3.ffn.experts.up", stored, **NEMOTRON), ups)

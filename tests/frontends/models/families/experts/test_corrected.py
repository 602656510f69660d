"""Families after DeepSeek-V3's router or latent attention: which layers have experts, special keys, layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.models.families import FAMILIES

from ..tables import counting, names, read, refusal, weight

MOE: dict[str, Any] = {
    **{"num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 24, "n_shared_experts": 1, "num_shared_experts": 1},
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


@pytest.mark.parametrize(
    ("family", "dense"),
    [("dots1", 0), ("glm4_moe", 1), ("solar_open", 0), ("exaone_moe", 1), ("hy_v3", 1), ("afmoe", 1)],
)
def test_default_number_of_dense_layers(family: str, dense: int) -> None:
    found = [moe is not None for moe in read(family, **MOE).moe]
    assert found == [False] * dense + [True] * (4 - dense)


def test_router_defaults_differ_from_deepseek() -> None:
    dots, glm, hy = (read(family, **MOE).moe[-1].router for family in ("dots1", "glm4_moe", "hy_v3"))
    assert (dots.renormalize, dots.scale, dots.groups) == (False, 1.0, 1)
    assert (glm.renormalize, glm.scale) == (True, 1.0)
    assert hy.scale == 2.826 and read("hy_v3", **MOE, router_scaling_factor=3.0).moe[-1].router.scale == 3.0


def test_dots_slides_after_max_window_layers() -> None:
    assert read("dots1", **MOE, max_window_layers=3, sliding_window=8).window == (None, None, None, 8)


def test_afmoe_scales_embeddings_with_mup_only() -> None:
    assert read("afmoe", **MOE).embed_scale == 1.0
    s = read("afmoe", **MOE, mup_enabled=True, sliding_window=8, global_attn_every_n_layers=2)
    assert s.embed_scale == 32**0.5
    assert s.window == (8, None, 8, None)
    assert [rope is not None for rope in s.rope] == [True, False, True, False]


def test_hunyuan_lists_of_equal_numbers_count_once() -> None:
    moe = read("hunyuan_v1_moe", num_experts=[4, 4], moe_topk=[2, 2]).moe
    assert (moe.experts, moe.k, moe.shared.hidden) == (4, 2, 48)


def test_minimax_rotates_rotary_dim_features() -> None:
    s = read("minimax_m2", **MOE, head_dim=16, rotary_dim=8)
    assert (s.rope.fraction, s.rope.theta, s.moe.router.scoring, s.moe.router.correction) == (0.5, 5e6, "sigmoid", True)
    assert read("minimax_m2", **MOE, head_dim=16).rope.fraction == 1.0


def test_ernie_layers_with_experts_have_a_start_an_end_and_an_interval() -> None:
    config = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}
    assert [moe is not None for moe in read("ernie4_5_moe", **config).moe] == [False, True, True, True]
    limited = {"moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 2}
    assert [moe is not None for moe in read("ernie4_5_moe", **config, **limited).moe] == [False, True, False, False]
    assert "moe_norm_min=0.1 must be at most 1e-6" in refusal("ernie4_5_moe", **config, moe_norm_min=0.1)
    stored = {"model.layers.1.mlp.moe_statics.e_score_correction_bias": counting(1, 4)}
    np.testing.assert_array_equal(
        weight("ernie4_5_moe", "layers.1.ffn.router.correction", stored, **config), counting(4)
    )


def test_granite_shared_expert_stores_gate_above_up() -> None:
    config = {**MOE, "shared_intermediate_size": 16}
    packed = counting(32, 32)
    stored = {"model.layers.0.shared_mlp.input_linear.weight": packed}
    np.testing.assert_array_equal(
        weight("granitemoeshared", "layers.0.ffn.shared.gate.weight", stored, **config), packed[:16]
    )
    np.testing.assert_array_equal(
        weight("granitemoeshared", "layers.0.ffn.shared.up.weight", stored, **config), packed[16:]
    )
    assert read("granitemoeshared", **MOE).moe.shared is None


def test_mellum_sparse_layers_are_listed() -> None:
    kinds = ["dense", "sparse", "sparse", "dense"]
    moe = read("mellum", **MOE, mlp_layer_types=kinds).moe
    assert [m is not None for m in moe] == [False, True, True, False]
    assert moe[1].router.renormalize


def test_mistral4_routes_by_softmax() -> None:
    rope = {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
    s = read("mistral4", **MOE, **LATENT, rope_parameters=rope)
    assert (s.moe[0].router.scoring, s.moe[0].router.correction) == ("softmax", False)
    assert s.mixer.temperature is not None


def test_minicpm3_scales_by_depth_and_base_width() -> None:
    s = read("minicpm3", **LATENT, dim_model_base=8)
    assert (s.embed_scale, s.residual_scale, s.logit_scale) == (12, 1.4 / 2, 0.25)
    assert s.mixer.rope.interleaved is False and s.moe is None


def test_names_of_selection_biases() -> None:
    assert names("hy_v3", "layers.1.ffn.router.correction", **MOE) == ["model.layers.1.mlp.expert_bias"]
    spelled = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert names("exaone_moe", "layers.1.ffn.router.correction", keys=[spelled], **MOE) == [spelled]


def test_files_of_minicpm3_do_not_state_scales() -> None:
    settings = FAMILIES["minicpm3"].gguf.settings
    assert settings["residual_scale"]({"block_count": 4}) == 0.7
    assert settings["logit_scale"]({"embedding_length": 512}) == 0.5

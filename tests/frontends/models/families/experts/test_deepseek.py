"""DeepSeek-V2 and V3: latent attention, routers in groups, dense first layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from weft.frontends.models.families.experts.deepseek import build_gguf_mla, find_latent_attention, find_sparse_layers

from ..tables import counting, names, read, refusal, weight

LATENT: dict[str, Any] = {
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2},
    **{"n_group": 2, "topk_group": 1},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}


def test_latent_attention_has_the_sizes_of_the_config() -> None:
    mla = find_latent_attention(read("deepseek_v3", **LATENT))
    assert (mla.heads, mla.rank, mla.head_dim, mla.rope_dim, mla.v_head_dim, mla.q_rank) == (4, 16, 6, 4, 5, 24)
    assert (mla.rope.interleaved, mla.scale) == (True, None)


def test_mscale_all_dim_sharpens_scores_under_yarn() -> None:
    assert read("deepseek_v3", **LATENT, rope_parameters=YARN).mixer.scale is None
    mla = read("deepseek_v3", **LATENT, rope_parameters={**YARN, "mscale_all_dim": 1.0}).mixer
    assert mla.scale == pytest.approx(10**-0.5 * (0.1 * math.log(4) + 1) ** 2)


def test_keys_and_values_are_rows_of_one_matrix_per_head() -> None:
    stored = counting(4 * (6 + 5), 16)
    by_head = stored.reshape(4, 11, 16)
    tensors = {"model.layers.0.self_attn.kv_b_proj.weight": stored}
    found = weight("deepseek_v2", "layers.0.attn.k_up.weight", tensors, **LATENT)
    np.testing.assert_array_equal(found, by_head[:, :6].reshape(24, 16))
    found = weight("deepseek_v2", "layers.0.attn.v_up.weight", tensors, **LATENT)
    np.testing.assert_array_equal(found, by_head[:, 6:].reshape(20, 16))


@pytest.mark.parametrize(
    ("first_dense", "config", "sparse"),
    [
        (None, {"first_k_dense_replace": 2}, [True, True, True]),
        (1, {}, [False, True, True]),
        (1, {"first_k_dense_replace": 2}, [False, False, True]),
        (1, {"mlp_layer_types": ["sparse", "dense", "sparse"]}, [True, False, True]),
    ],
)
def test_sparse_layers(first_dense: int | None, config: dict[str, Any], sparse: list[bool]) -> None:
    assert list(find_sparse_layers(first_dense)({"num_hidden_layers": 3, **config})) == sparse


def test_v2_router_is_greedy_or_limited_to_groups() -> None:
    router = read("deepseek_v2", **LATENT).moe[0].router
    assert (router.scoring, router.renormalize, router.groups) == ("softmax", False, 1)
    router = read("deepseek_v2", **LATENT, topk_method="group_limited_greedy").moe[0].router
    assert (router.groups, router.top_groups, router.group_score) == (2, 1, "max")


def test_v3_router_has_sigmoids_and_a_selection_bias() -> None:
    moe = read("deepseek_v3", **LATENT, first_k_dense_replace=1).moe
    assert moe[0] is None
    router = moe[1].router
    assert (router.scoring, router.correction, router.renormalize, router.scale) == ("sigmoid", True, True, 2.5)
    assert (router.groups, router.top_groups, moe[1].shared.hidden) == (2, 1, 48)
    name = "layers.1.ffn.router.correction"
    assert names("deepseek_v3", name, **LATENT) == ["model.layers.1.mlp.gate.e_score_correction_bias"]


def test_files_state_the_width_of_keys_with_the_rotary_part() -> None:
    file = {
        **{"attention.head_count": 4, "attention.kv_lora_rank": 16, "attention.key_length_mla": 10},
        **{"attention.value_length_mla": 5, "rope.dimension_count": 4, "attention.layer_norm_rms_epsilon": 1e-5},
    }
    mla = build_gguf_mla(file)
    assert (mla.head_dim, mla.rope_dim, mla.v_head_dim, mla.q_rank, mla.scale) == (6, 4, 5, None, None)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("deepseek_v2", "scoring_func", "sigmoid"),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "moe_layer_freq", 2),
    ],
)
def test_refusals(family: str, key: str, value: Any) -> None:
    assert f"{key}={value!r} is not supported" in refusal(family, **LATENT, **{key: value})

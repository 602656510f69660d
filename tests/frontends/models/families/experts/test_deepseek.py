"""DeepSeek-V2 to V3.2 and GLM: latent attention, routers in groups, dense first layers, lightning indexes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import transformers

from weft.frontends.models.families import FAMILIES
from weft.frontends.models.families.experts.deepseek import (
    build_gguf_mla,
    find_latent_attention,
    find_sparse_layers,
    read_index_types,
)
from weft.frontends.models.tables.gguf import INDEXED
from weft.ir import WeftError

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


GLM: dict[str, Any] = {
    **{"num_hidden_layers": 7, "num_attention_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
}
FILE: dict[str, Any] = {
    **{"block_count": 4, "attention.head_count": 4, "attention.kv_lora_rank": 16, "attention.q_lora_rank": 24},
    **{"attention.key_length_mla": 24, "attention.value_length_mla": 12, "rope.dimension_count": 8},
    **{"attention.layer_norm_rms_epsilon": 1e-6, "attention.indexer.head_count": 2},
    **{"attention.indexer.key_length": 16, "attention.indexer.top_k": 6},
}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
        {"index_topk_freq": 0},
        {"index_topk_pattern": "FSSFFSS"},
        {"index_topk_pattern": ["full", "shared"] * 3 + ["full"]},
        {"indexer_types": ["full"] + ["shared"] * 6, "index_topk_freq": 2},
    ],
    ids=str,
)
def test_index_types_equal_those_of_transformers(config: dict[str, Any]) -> None:
    assert read_index_types(GLM | config) == transformers.GlmMoeDsaConfig(**GLM, **config).indexer_types


def test_layers_keep_the_selection_that_later_layers_share() -> None:
    mixers = FAMILIES["glm_moe_dsa"].settings["mixer"](GLM | {"index_topk_pattern": "FFSSFSF"})
    assert [m.index is not None for m in mixers] == [True, True, False, False, True, False, True]
    assert [m.keep_index for m in mixers] == [None, "index", None, None, "index", None, None]
    assert [m.share_index for m in mixers] == [None, None, "index", "index", None, "index", None]
    assert {(m.index.heads, m.index.head_dim, m.index.top_k) for m in mixers if m.index} == {(32, 128, 2048)}


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("glm_moe_dsa", {"index_topk_pattern": "SFFFFFF"}, "index_topk_pattern=.* first full"),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 6}, "indexer_types=.* for each of 7 layers"),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 6 + ["other"]}, "indexer_types=.* must list full or shared"),
        ("glm_moe_dsa", {"q_lora_rank": None}, "q_lora_rank=None is not supported"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 7}, "layer_types has 'full_attention'"),
    ],
)
def test_refusals_of_index_settings(family: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        FAMILIES[family].settings["mixer"](GLM | config)


def test_files_list_layers_with_an_index() -> None:
    rule = FAMILIES["glm_moe_dsa"].gguf.settings["mixer"]

    def own(**config: Any) -> list[bool]:
        return [m.index is not None for m in rule({**FILE, **config})]

    assert own(**{INDEXED: [0, 2]}) == [True, False, True, False]
    # Some files repeat the tensors in layers that do not use them.
    assert own(**{INDEXED: [0, 1, 2, 3], "attention.indexer.types": [1, 0, 0, 1]}) == [True, False, False, True]
    with pytest.raises(WeftError, match=r"blk\.0\.indexer\.proj is missing"):
        own(**{INDEXED: [1]})

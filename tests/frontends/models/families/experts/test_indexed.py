"""Families whose latent attention has an index: which layers have their own, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from weft.frontends.models.families import FAMILIES
from weft.frontends.models.families.experts.indexed import read_index_types
from weft.frontends.models.tables.gguf import INDEXED
from weft.ir import WeftError

LATENT: dict[str, Any] = {
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
    assert read_index_types(LATENT | config) == transformers.GlmMoeDsaConfig(**LATENT, **config).indexer_types


def test_layers_keep_the_selection_that_later_layers_share() -> None:
    mixers = FAMILIES["glm_moe_dsa"].settings["mixer"](LATENT | {"index_topk_pattern": "FFSSFSF"})
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
def test_refusals(family: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        FAMILIES[family].settings["mixer"](LATENT | config)


def test_files_list_layers_with_an_index() -> None:
    rule = FAMILIES["glm_moe_dsa"].gguf.settings["mixer"]

    def own(**config: Any) -> list[bool]:
        return [m.index is not None for m in rule({**FILE, **config})]

    assert own(**{INDEXED: [0, 2]}) == [True, False, True, False]
    # Some files repeat the tensors in layers that do not use them.
    assert own(**{INDEXED: [0, 1, 2, 3], "attention.indexer.types": [1, 0, 0, 1]}) == [True, False, False, True]
    with pytest.raises(WeftError, match=r"blk\.0\.indexer\.proj is missing"):
        own(**{INDEXED: [1]})

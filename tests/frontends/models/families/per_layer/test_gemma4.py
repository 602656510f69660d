"""Gemma 4: layer types, shared keys and values, heads of two sizes, experts next to the feed-forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.models.families.per_layer.gemma4 import build_rope, convert_keys, name_kv, nest_names, read_types
from weft.frontends.models.tables.rope_config import FREQUENCIES
from weft.ir import WeftError

from ..tables import counting, read, weight

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 4}
FILE: dict[str, Any] = {
    **{"block_count": 5, "attention.head_count": 4, "attention.head_count_kv": [2, 2, 2, 2, 1]},
    **{"attention.key_length": 16, "attention.key_length_swa": 8, "feed_forward_length": 48, "vocab_size": 97},
    **{"attention.sliding_window": 8, "attention.layer_norm_rms_epsilon": 1e-6, "embedding_length_per_layer_input": 4},
}


def test_types_have_a_period_or_a_list() -> None:
    assert read_types({"num_hidden_layers": 3}, 2) == [SLIDING, FULL, SLIDING]
    assert read_types({"num_hidden_layers": 2, "layer_types": [FULL, FULL]}, 2) == [FULL, FULL]


def test_layers_share_the_keys_of_the_last_unshared_layer_of_their_type() -> None:
    types = [SLIDING, FULL, SLIDING, SLIDING]
    assert [name_kv({"num_kv_shared_layers": 1}, types, i) for i in range(4)] == [
        {}, {"keep_kv": FULL}, {"keep_kv": SLIDING}, {"share_kv": SLIDING},
    ]  # fmt: skip
    assert name_kv({}, types, 3) == {}


def test_proportional_rope_rotates_a_fraction_of_the_pairs() -> None:
    defaults = {FULL: {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25}}
    rope = build_rope({}, FULL, 16, defaults)
    assert (rope.theta, rope.scaling, rope.rotated) == (1e6, "proportional", 2)
    plain = build_rope({"rope_parameters": {FULL: {"rope_type": "default"}}}, FULL, 16, defaults)
    assert (plain.theta, plain.scaling) == (1e6, "none")


def test_global_layers_have_larger_heads_and_may_use_keys_as_values() -> None:
    config = {**SIZES, "layer_types": [SLIDING, FULL] * 2, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    attention = [layer.block.attn for layer in read("gemma4_text", **config).block[:2]]
    assert [(a.head_dim, a.kv_heads, a.keys_as_values) for a in attention] == [(8, 2, False), (16, 1, True)]
    assert attention[0].window == 512 and attention[1].window is None


def test_experts_are_next_to_the_dense_feed_forward() -> None:
    config = {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 24}
    layer = read("gemma4_text", **SIZES, **config).block[0]
    assert layer.block.ffn is None
    assert (layer.ffn.dense.hidden, layer.ffn.moe.hidden) == (48, 24)
    assert read("gemma4_text", **SIZES).block[0].block.ffn.hidden == 48


def test_shared_layers_may_be_twice_as_wide() -> None:
    config = {"use_double_wide_mlp": True, "num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL] * 2}
    assert [layer.block.ffn.hidden for layer in read("gemma4_text", **SIZES, **config).block] == [48, 48, 96, 96]


def test_router_norm_is_divided_by_the_root_of_the_width() -> None:
    found = weight(
        "gemma4_text", "layers.0.ffn.router_norm.weight", {"model.layers.0.router.scale": counting(32)}, **SIZES
    )
    np.testing.assert_allclose(found, counting(32) / 32**0.5, rtol=1e-6)


def test_nest_names_moves_parameters_of_layers() -> None:
    assert nest_names({"layers.{i}.attn.q": "a", "embed": "b"}) == {"layers.{i}.block.attn.q": "a", "embed": "b"}


def test_files_convert_to_configs() -> None:
    converted = convert_keys(FILE)
    assert converted["layer_types"] == [SLIDING] * 4 + [FULL]
    assert [converted["per_layer_config"][i]["head_dim"] for i in range(5)] == [8, 8, 8, 8, 16]
    assert converted["per_layer_config"][4]["num_key_value_heads"] == 1
    rotated = convert_keys({**FILE, FREQUENCIES: [1, 1, 1e30, 1e30, 1e30, 1e30, 1e30, 1e30]})
    assert rotated["rope_parameters"][FULL]["partial_rotary_factor"] == 0.25
    with pytest.raises(WeftError, match="must have values 1 and 1e30 only"):
        convert_keys({**FILE, FREQUENCIES: [1, 2]})

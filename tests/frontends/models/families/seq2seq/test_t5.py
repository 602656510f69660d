"""T5 and its successors: relative positions, gates by name, scaled logits, T5Gemma's two configs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.models.families import FAMILIES
from weft.frontends.models.families.seq2seq.t5 import build_t5_bias, make_feed_forward_rules
from weft.frontends.models.tables import gguf

from ..tables import ABSENT, counting, names, read, refusal, weight

T5: dict[str, Any] = {
    **{"num_hidden_layers": ABSENT, "num_attention_heads": ABSENT, "d_model": 32, "d_kv": 8, "d_ff": 48},
    **{"num_layers": 2, "num_heads": 4},
}


@pytest.mark.parametrize(
    ("config", "activation", "gated"),
    [
        ({}, "relu", False),
        ({"feed_forward_proj": "gated-gelu"}, "gelu_new", True),
        ({"feed_forward_proj": "gated-silu"}, "silu", True),
        ({"feed_forward_proj": "gelu"}, "gelu", False),
        ({"dense_act_fn": "relu", "is_gated_act": True, "feed_forward_proj": "gelu"}, "relu", True),
    ],
)
def test_feed_forward_proj_states_activation_and_gate(config: dict[str, Any], activation: str, gated: bool) -> None:
    rules = make_feed_forward_rules("relu")
    assert (rules["activation"](config), rules["gated"](config)) == (activation, gated)


def test_bias_has_buckets_of_all_heads() -> None:
    bias = build_t5_bias({"num_heads": 4, "relative_attention_num_buckets": 8})
    assert (bias.buckets, bias.max_distance, bias.heads) == (8, 128, 4)


def test_scores_have_no_scale_and_logits_have_one_if_tied() -> None:
    s = read("t5", **T5)
    assert (s.scale, s.logit_scale, s.eps) == (1.0, 32**-0.5, 1e-6)
    assert read("t5", **T5, tie_word_embeddings=False).logit_scale == 1.0
    assert read("t5", **T5, tie_word_embeddings=False, scale_decoder_outputs=True).logit_scale == 32**-0.5
    assert read("mt5", **T5).logit_scale == 1.0


def test_names_of_up_depend_on_the_gate() -> None:
    at = "encoder.block.1.layer.1.DenseReluDense"
    assert names("t5", "encoder.layers.1.ffn.up.weight", **T5) == [f"{at}.wi.weight"]
    assert names("mt5", "encoder.layers.1.ffn.up.weight", **T5) == [f"{at}.wi_1.weight"]
    assert names("t5", "decoder.layers.1.cross.k.weight", **T5) == ["decoder.block.1.layer.1.EncDecAttention.k.weight"]


def test_decoder_depth_and_tied_head() -> None:
    assert read("t5", **T5).decoder == {"layers": 2}
    assert read("t5", **T5, num_decoder_layers=3).decoder == {"layers": 3}
    assert read("t5", **T5).tie and not read("t5", **T5, keys=["lm_head.weight"]).tie


def test_umt5_has_a_bias_per_layer() -> None:
    s = read("umt5", **T5)
    assert s.position_bias is None and s.bias.heads == 4
    bias = names("umt5", "encoder.layers.1.attn.bias.weight", **T5)
    assert bias == ["encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"]


def test_files_share_a_bias_or_have_one_per_layer() -> None:
    settings = FAMILIES["t5"].gguf.settings
    file = {"attention.relative_buckets_count": 32, "attention.head_count": 4, "embedding_length": 64, gguf.GATED: [0]}
    for listed, shared, scale in (([0], True, 1.0), ([0, 1], False, 1 / 8)):
        config = {**file, gguf.BIASED: listed}
        assert (settings["position_bias"](config) is not None, settings["bias"](config) is not None) == (
            shared,
            not shared,
        )
        assert settings["logit_scale"](config) == scale
    assert settings["logit_scale"]({**file, gguf.BIASED: [0], gguf.GATED: []}) == 1 / 8


def test_t5gemma_reads_a_config_per_half() -> None:
    half = {
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "max_position_embeddings": 64, "sliding_window": 8},
    }
    s = read("t5gemma", encoder=half, decoder=half | {"num_hidden_layers": 3})
    assert s.window == (9, None)  # the encoder sees one token more
    assert (s.decoder["layers"], s.decoder["window"]) == (3, (8, None, 8))
    assert "is_encoder_decoder=False is not supported" in refusal(
        "t5gemma", encoder=half, decoder=half, is_encoder_decoder=False
    )


SWITCH: dict[str, Any] = {
    **{"num_hidden_layers": ABSENT, "num_attention_heads": ABSENT, "d_model": 32, "d_kv": 8, "d_ff": 48},
    **{"num_layers": 6, "num_heads": 4, "num_experts": 2},
}


@pytest.mark.parametrize(("count", "layers"), [(3, [1, 3, 5]), (2, [1, 4]), (6, [0, 1, 2, 3, 4, 5]), (0, [1])])
def test_sparse_layers_are_evenly_spaced(count: int, layers: list[int]) -> None:
    moe = read("switch_transformers", **SWITCH, num_sparse_encoder_layers=count).moe
    assert [i for i, m in enumerate(moe) if m is not None] == layers


def test_one_expert_per_token_up_to_a_capacity() -> None:
    moe = read("switch_transformers", **SWITCH, expert_capacity=8).moe[1]
    assert (moe.k, moe.experts, moe.hidden, moe.gated, moe.router.capacity) == (1, 2, 48, False, 8)
    assert not moe.router.renormalize and not moe.router.bias


def test_decoder_has_its_own_depth_and_experts() -> None:
    decoder = read("switch_transformers", **SWITCH, num_decoder_layers=4, num_sparse_decoder_layers=1).decoder
    assert decoder["layers"] == 4
    assert [m is not None for m in decoder["moe"]] == [False, True, False, False]


def test_experts_are_stacked_from_numbered_tensors() -> None:
    at = "encoder.block.1.layer.1.mlp"
    stored = {f"{at}.experts.expert_{e}.wi.weight": counting(48, 32) + e for e in range(2)}
    found = weight("switch_transformers", "encoder.layers.1.ffn.experts.up", stored, **SWITCH)
    np.testing.assert_array_equal(found, np.stack([counting(48, 32), counting(48, 32) + 1]))
    found = names("switch_transformers", "decoder.layers.1.ffn.router.weight", **SWITCH)
    assert found == ["decoder.block.1.layer.2.mlp.router.classifier.weight"]


def test_gated_feed_forwards_are_refused() -> None:
    assert "feed_forward_proj='gated-gelu' is not supported" in refusal(
        "switch_transformers", **SWITCH, feed_forward_proj="gated-gelu"
    )

"""DeBERTa: which relative scores a config has, the table of distances, projections fused head by head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..tables import counting, names, read, refusal, weight

RELATIVE: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}


@pytest.mark.parametrize("stated", [["p2c", "c2p"], "c2p|p2c", "C2P | p2c"])
def test_score_types_are_a_list_or_one_word(stated: Any) -> None:
    mixer = read("deberta-v2", relative_attention=True, pos_att_type=stated).mixer
    assert mixer == read("deberta-v2", **RELATIVE).mixer
    assert mixer != read("deberta-v2", relative_attention=True, pos_att_type="c2p").mixer


@pytest.mark.parametrize(
    "config",
    [{"pos_att_type": ["c2p"]}, {**RELATIVE, "pos_att_type": "c2p|c2p"}, {**RELATIVE, "pos_att_type": ["p2p"]}],
)
def test_other_score_types_are_refused(config: dict[str, Any]) -> None:
    assert "is not supported, only c2p and p2c, once each, and relative_attention=True" in refusal(
        "deberta-v2", **config
    )


def test_relative_table_spans_positions_or_buckets() -> None:
    plain = read("deberta-v2", **RELATIVE).relative
    assert plain == read("deberta-v2", **RELATIVE, max_relative_positions=64).relative
    assert plain != read("deberta-v2", **RELATIVE, max_relative_positions=16).relative
    bucketed = read("deberta-v2", **RELATIVE, position_buckets=8, norm_rel_ebd="layer_norm").relative
    assert 8 in vars(bucketed).values() and bucketed.norm is not None
    assert read("deberta-v2", relative_attention=True).relative is None


def test_only_the_first_block_has_a_convolution() -> None:
    blocks = read("deberta-v2", **RELATIVE, conv_kernel_size=3).block
    assert [block is not None for block in blocks] == [True, False, False, False]
    assert read("deberta-v2", **RELATIVE).block is None


def test_positions_of_the_input_are_optional() -> None:
    assert read("deberta-v2", **RELATIVE).learned_positions == 64
    assert read("deberta-v2", **RELATIVE, position_biased_input=False).learned_positions is None
    assert "embedding_size=16 must be hidden_size=" in refusal("deberta-v2", **RELATIVE, embedding_size=16)


def test_deberta_fuses_projections_head_by_head_with_two_biases() -> None:
    fused = counting(96, 32)
    at = "deberta.encoder.layer.0.attention.self"
    found = weight("deberta", "layers.0.attn.k.weight", {f"{at}.in_proj.weight": fused}, **RELATIVE)
    np.testing.assert_array_equal(found, fused.reshape(4, 3, 8, 32)[:, 1].reshape(32, 32))
    assert names("deberta", "layers.0.attn.v.bias", **RELATIVE) == [f"{at}.v_bias"]
    assert "talking_head=True is not supported" in refusal("deberta", **RELATIVE, talking_head=True)

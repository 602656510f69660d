"""Switch Transformers: which layers have experts, how their tensors are numbered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..tables import ABSENT, counting, names, read, refusal, weight

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

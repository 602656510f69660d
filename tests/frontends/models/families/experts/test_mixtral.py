"""Mixtures of experts: which layers are sparse, how experts are stored, shared experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.models.families.experts.mixtral import build_granite_experts, read_activation
from weft.ir import WeftError

from ..tables import counting, read, refusal, weight

MOE = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
QWEN2 = {**MOE, "shared_expert_intermediate_size": 40}


def test_mixtral_renormalizes_and_takes_the_plain_width() -> None:
    moe = read("mixtral", **MOE).moe
    assert (moe.experts, moe.hidden, moe.k, moe.router.renormalize) == (2, 48, 1, True)
    assert read("mixtral", **MOE).window is None


def test_experts_are_separate_tensors_or_one() -> None:
    gates = [counting(48, 32) + 1000 * e for e in range(2)]
    ups = [gate + 0.5 for gate in gates]
    at = "model.layers.0.block_sparse_moe.experts"
    separate = {f"{at}.{e}.{n}.weight": x[e] for e in range(2) for n, x in (("w1", gates), ("w3", ups))}
    fused = {
        "model.layers.0.mlp.experts.gate_up_proj": np.stack([np.concatenate(p) for p in zip(gates, ups, strict=True)])
    }
    for stored in (separate, fused):
        np.testing.assert_array_equal(weight("mixtral", "layers.0.ffn.experts.gate", stored, **MOE), np.stack(gates))
        np.testing.assert_array_equal(weight("mixtral", "layers.0.ffn.experts.up", stored, **MOE), np.stack(ups))


@pytest.mark.parametrize(
    ("config", "sparse"),
    [
        ({}, [True] * 4),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"mlp_only_layers": [0, 3]}, [False, True, True, False]),
    ],
)
def test_qwen_layers_with_experts(config: dict[str, Any], sparse: list[bool]) -> None:
    assert [moe is not None for moe in read("qwen3_moe", **MOE, **config).moe] == sparse


def test_qwen2_has_a_gated_shared_expert_and_windows_in_even_layers() -> None:
    s = read("qwen2_moe", **QWEN2, use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert (s.moe[0].shared.hidden, s.moe[0].shared_gate, s.moe[0].router.renormalize) == (40, True, False)
    assert s.window == (8, None, None, None)
    assert read("qwen3_moe", **MOE, norm_topk_prob=True).moe[0].router.renormalize


def test_activations_are_known_or_refused() -> None:
    assert read_activation({"hidden_act": "gelu_new"}) == "gelu_tanh"
    with pytest.raises(WeftError, match="hidden_act='mish' is unknown; known are gelu"):
        read_activation({"hidden_act": "mish"})


def test_granite_shared_experts_are_optional() -> None:
    config = {**MOE, "intermediate_size": 48, "shared_intermediate_size": 16}
    moe = build_granite_experts(config)
    assert moe is not None and moe.shared.hidden == 16
    assert build_granite_experts({**config, "num_local_experts": 0}) is None


def test_clipped_projections_are_refused() -> None:
    assert "clip_qkv=8.0 is not supported" in refusal("olmoe", **MOE, clip_qkv=8.0)

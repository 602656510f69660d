"""GPT-2 and GPT-BigCode: learned positions, transposed and packed projections, scales by layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..tables import counting, names, read, refusal, weight

GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}


def test_sizes_have_the_short_keys() -> None:
    s = read("gpt2", **GPT2)
    assert (s.dim, s.layers, s.heads, s.ffn, s.context, s.learned_positions) == (32, 4, 4, 128, 64, 64)
    assert read("gpt2", **GPT2, n_inner=40).ffn == 40


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, None),
        ({"scale_attn_weights": False}, 1.0),
        ({"scale_attn_by_inverse_layer_idx": True}, tuple(8**-0.5 / n for n in (1, 2, 3, 4))),
        ({"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}, (1.0, 1 / 2, 1 / 3, 1 / 4)),
    ],
)
def test_scores_are_scaled_by_head_size_and_layer(config: dict[str, Any], scale: Any) -> None:
    assert read("gpt2", **GPT2, **config).scale == scale


def test_linear_layers_are_stored_transposed() -> None:
    stored = counting(32, 128)
    found = weight("gpt2", "layers.1.ffn.up.weight", {"transformer.h.1.mlp.c_fc.weight": stored}, **GPT2)
    np.testing.assert_array_equal(found, stored.T)


def test_queries_keys_and_values_are_columns_of_one_matrix() -> None:
    stored = counting(32, 96)
    for i, x in enumerate("qkv"):
        found = weight("gpt2", f"layers.0.attn.{x}.weight", {"h.0.attn.c_attn.weight": stored}, **GPT2)
        np.testing.assert_array_equal(found, stored[:, 32 * i : 32 * (i + 1)].T)


def test_bigcode_has_one_kv_head_and_stores_rows() -> None:
    assert read("gpt_bigcode", **GPT2).kv_heads == 1
    assert read("gpt_bigcode", **GPT2, multi_query=False).kv_heads is None
    stored = counting(32 + 8 + 8, 32)
    found = weight("gpt_bigcode", "layers.0.attn.v.weight", {"h.0.attn.c_attn.weight": stored}, **GPT2)
    np.testing.assert_array_equal(found, stored[40:])


def test_embeddings_and_refusals() -> None:
    assert names("gpt2", "positions.weight", **GPT2) == ["transformer.wpe.weight"]
    assert "add_cross_attention=True is not supported" in refusal("gpt2", **GPT2, add_cross_attention=True)

"""Gemma 3n: sparse first layers, matrices of streams in one tensor, keys and values of earlier layers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from weft.frontends.models.families import FAMILIES

from ..tables import counting, evaluate, read

SIZES = {"num_key_value_heads": 2, "head_dim": 8, "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 0}


def test_first_ten_layers_of_deep_models_are_sparse() -> None:
    blocks = read("gemma3n_text", **SIZES, num_hidden_layers=12).block
    assert [block.ffn.sparsity for block in blocks] == [0.95] * 10 + [0.0] * 2
    assert [block.ffn.sparsity for block in read("gemma3n_text", **SIZES).block] == [0.0] * 4


def test_every_fifth_layer_is_global_with_another_base() -> None:
    blocks = read("gemma3n_text", **SIZES, num_hidden_layers=5, sliding_window=8).block
    assert [block.attn.window for block in blocks] == [8, 8, 8, 8, None]
    assert [block.attn.rope.theta for block in blocks] == [1e4] * 4 + [1e6]


def test_last_layers_share_keys_and_values() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    blocks = read("gemma3n_text", **SIZES | {"num_kv_shared_layers": 2}, layer_types=types).block
    assert [block.attn.keep_kv for block in blocks] == ["sliding_attention", "full_attention", None, None]
    assert [block.attn.share_kv for block in blocks] == [None, None, "sliding_attention", "full_attention"]


def test_softcap_zero_means_none() -> None:
    assert read("gemma3n_text", **SIZES).logit_softcap == 30.0
    assert read("gemma3n_text", **SIZES, final_logit_softcapping=0).logit_softcap is None
    assert read("gemma3n_text", **SIZES).embed_scale == pytest.approx(math.sqrt(32))


def test_files_stack_the_matrices_of_streams() -> None:
    table = FAMILIES["gemma3n_text"].gguf
    assert table is not None
    stored = counting(3, 32, 32)
    settings = read("gemma3n_text", **SIZES)
    recipe = table.recipe("spread.projections.1.weight", settings, frozenset(["altup_proj.weight"]))
    assert recipe is not None
    np.testing.assert_array_equal(evaluate(recipe, {"altup_proj.weight": stored}), stored[1])


def test_files_state_sparsity_in_standard_deviations() -> None:
    file = {
        **{"block_count": 2, "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8},
        **{"feed_forward_length": 48, "attention.sliding_window": 8, "attention.layer_norm_rms_epsilon": 1e-6},
        **{"embedding_length_per_layer_input": 4, "vocab_size": 97, "activation_sparsity_scale": [1.6448536, 0.0]},
    }
    blocks = FAMILIES["gemma3n_text"].gguf.settings["block"](file)
    assert [block.ffn.sparsity for block in blocks] == pytest.approx([0.95, 0.5])

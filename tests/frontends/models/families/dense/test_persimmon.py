"""Persimmon, CodeGen and DiffLlama: projections in unusual layouts, differences of attention maps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ..tables import counting, names, read, weight


def test_persimmon_packs_projections_per_head() -> None:
    packed = counting(96, 32)
    stored = {"model.layers.0.self_attn.query_key_value.weight": packed}
    found = weight("persimmon", "layers.0.attn.v.weight", stored)
    np.testing.assert_array_equal(found, packed.reshape(4, 3, 8, 32)[:, 2].reshape(32, 32))


def test_persimmon_normalizes_queries_and_keys_unless_stated() -> None:
    assert (read("persimmon").qk_norm, read("persimmon", qk_layernorm=False).qk_norm) == ("head", "none")
    assert (read("persimmon").activation, read("persimmon").gated) == ("relu2", False)


def test_codegen_merges_the_parts_of_four_devices() -> None:
    config = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    packed = counting(96, 32)
    by_device = packed.reshape(4, 3, 8, 32)  # each device has q, v, k
    for i, x in enumerate("qvk"):
        found = weight(
            "codegen", f"layers.0.attn.{x}.weight", {"transformer.h.0.attn.qkv_proj.weight": packed}, **config
        )
        np.testing.assert_array_equal(found, by_device[:, i].reshape(32, 32))


def test_diffllama_lambda_grows_with_depth() -> None:
    mixers = read("diffllama").mixer
    assert len(mixers) == 4
    wanted = [0.8 - 0.6 * math.exp(-0.3 * i) for i in range(4)]
    assert [mixer.lambda_init for mixer in mixers] == pytest.approx(wanted)
    assert names("diffllama", "layers.2.attn.lambda_k1") == ["model.layers.2.self_attn.lambda_k1"]

"""Cached attention with biases by position and over latents, on both CPU targets, against a formula of the text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from weft import MLA, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.ir import Graph, TensorType, Value, ops
from weft.ir.types import dtypes
from weft.passes import run_passes
from weft.passes.core.equivalence import EquivalenceCheck
from weft.passes.library.cache.kv_cache import KvCache

from ..attention_models import (
    BATCH,
    HEADS,
    SEQ,
    SLOPES,
    Array,
    Decoding,
    alibi,
    decoder,
    draw,
    formula,
    positions,
    weight,
)

CPU = ("onnx", "ort-cpu")
CUTS = [(24,), (1,) * 24, (10, 14), (3, 8, 1, 1, 11)]
EVERY = np.arange(24)
RNG = np.random.default_rng(7)
TABLE, FREE = RNG.standard_normal((8, HEADS)), RNG.standard_normal(HEADS)


def seen(i: Array, j: Array) -> Array:
    return j <= i


def t5(graph: Graph, q: Value) -> Value:
    at = positions(graph)
    return ops.relative_position_bias(weight(graph, "table", TABLE), at, at, bidirectional=False, max_distance=16)


def by_key(graph: Graph, q: Value) -> Value:
    """Return a slope per head times the position of the key: [1, heads, 1, keys]."""
    keys = ops.cast(ops.iota(q, axis=1), to=dtypes.f32)
    return ops.mul(weight(graph, "free", FREE.reshape(1, HEADS, 1, 1)), keys)


def bucket(distance: int) -> int:
    """Return T5's causal bucket of 8 with a maximum distance of 16: 4 exact, 4 logarithmic."""
    return distance if distance < 4 else min(7, 4 + int(math.log(distance / 4) / math.log(16 / 4) * 4))


BIASES: dict[str, tuple[Callable[[Graph, Value], Value], Array]] = {
    "alibi": (alibi, SLOPES[:, None, None] * (EVERY[None] - EVERY[:, None])),
    "t5": (t5, np.array([[[TABLE[bucket(max(i - j, 0)), h] for j in EVERY] for i in EVERY] for h in range(HEADS)])),
    "by key": (by_key, FREE[:, None, None] * EVERY),
}


@pytest.mark.parametrize("target", CPU)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("name", BIASES)
def test_biases_by_position(target: str, cuts: tuple[int, ...], name: str) -> None:
    make, bias = BIASES[name]
    graph = decoder(make, softcap=5.0)
    decoding = Decoding(graph, target, 1, 30)
    fused = "GroupQueryAttention" if target == "ort-cpu" else "Attention"
    assert decoding.ops.count(fused) == 1
    assert "Softmax" not in decoding.ops
    inputs = draw(np.random.default_rng(0), graph, 1, 24)
    np.testing.assert_allclose(decoding.chunks(inputs, cuts), formula(inputs, seen, bias=bias, softcap=5.0), atol=3e-6)


@pytest.mark.parametrize("target", CPU)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("window", [None, 6])
def test_biases_with_attention_sinks(target: str, cuts: tuple[int, ...], window: int | None) -> None:
    make, bias = BIASES["alibi"]
    graph = decoder(make, sinks=FREE, window=window)
    decoding = Decoding(graph, target, 1, 30)
    assert "Softmax" not in decoding.ops
    inputs = draw(np.random.default_rng(0), graph, 1, 24)
    wanted = formula(inputs, lambda i, j: i - j < (window or 24), bias=bias, sinks=FREE)
    np.testing.assert_allclose(decoding.chunks(inputs, cuts), wanted, atol=3e-6)


@pytest.mark.parametrize("target", CPU)
def test_biases_of_rows_at_different_positions(target: str) -> None:
    make, bias = BIASES["alibi"]
    graph = decoder(make)
    decoding = Decoding(graph, target, 3, 30)
    inputs, lengths, rows = draw(np.random.default_rng(0), graph, 3, 24), np.array([9, 2, 12]), np.arange(3)
    wanted = formula(inputs, seen, bias=bias)
    first = decoding.call(
        {k: v[:, :12] for k, v in inputs.items()}, np.tile(np.arange(12), (3, 1)), np.arange(12) < lengths[:, None]
    )
    for row, n in enumerate(lengths):
        np.testing.assert_allclose(first[row, :n], wanted[row, :n], atol=3e-6)
    for _ in range(4):
        mask = np.arange(30) <= lengths[:, None]  # as wide as the caches
        y = decoding.call({k: v[rows, lengths][:, None] for k, v in inputs.items()}, lengths[:, None], mask)
        np.testing.assert_allclose(y[:, 0], wanted[rows, lengths], atol=3e-6)
        lengths = lengths + 1


@pytest.mark.parametrize("target", CPU)
def test_layers_share_masks_and_biases(target: str) -> None:
    def count(layers: int) -> int:
        graph = Graph("many", decoder().reader)
        widths = {"q": 32, "k": 16, "v": 16}
        q, k, v = (graph.add_input(name, TensorType(dtypes.f32, (BATCH, SEQ, w))) for name, w in widths.items())
        bias = alibi(graph, q)
        for _ in range(layers):
            q = ops.attention(q, k, v, bias, heads=HEADS, kv_heads=2, causal=True, window=9)
        graph.add_output("y", q)
        kinds = Decoding(graph, target, 1, 30).ops
        return sum(kind in ("Shape", "Range", "Less", "Where", "Pad", "Expand", "Cast", "Gather") for kind in kinds)

    assert count(4) == count(1)


@pytest.mark.parametrize("target", CPU)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("value_dim", [8, 5])
def test_latent_cache_serves_keys_and_values(target: str, cuts: tuple[int, ...], value_dim: int) -> None:
    """One tensor holds keys and values."""
    graph = decoder(v=False, kv_heads=1, value_dim=value_dim)
    decoding = Decoding(graph, target, 1, 30)
    assert {name: c.shape for name, c in decoding.caches.items()} == {"past_key_values.0.key": (1, 1, 30, 8)}
    assert "Softmax" not in decoding.ops
    inputs = draw(np.random.default_rng(0), graph, 1, 24)
    wanted = formula(inputs, seen, kv_heads=1, value_dim=value_dim)
    np.testing.assert_allclose(decoding.chunks(inputs, cuts), wanted, atol=3e-6)


def mla(**sizes: Any) -> MLA:
    return MLA(rope=RoPE(10_000), **sizes)


def test_latent_decoder_gets_one_kv_cache() -> None:
    small = mla(heads=3, rank=6, head_dim=4, rope_dim=2, v_head_dim=5)
    model = Decoder(vocab=17, dim=12, layers=[Block(small, GatedMLP(11), norm=RMSNorm(1e-6))])
    before = model.graph()
    after = run_passes(before, "kv-cache")
    KvCache().check(before, after, EquivalenceCheck())
    assert str(after.inputs["past_key_values.0.key"].type) == "f32[batch, 1, capacity, 8]"
    assert "past_key_values.0.value" not in after.inputs


def test_deepseek_v3_caches_576_values_per_token_and_layer() -> None:
    layer = mla(heads=128, rank=512, head_dim=128, rope_dim=64, v_head_dim=128)
    model = Decoder(vocab=32, dim=7168, layers=[Block(layer, GatedMLP(64), norm=RMSNorm(1e-6))] * 2)
    graph = run_passes(model.graph(), "kv-cache, cast{dtype=bf16}")
    per_token = {n: v.shape[1] * v.shape[3] * 2 for n, v in graph.inputs.items() if n.startswith("past")}
    assert per_token == {f"past_key_values.{i}.key": 576 * 2 for i in range(2)}

"""Scales of cached keys and values: fitted to the largest value, or to the smallest error."""

from __future__ import annotations

import numpy as np

from weft.ir import Graph, TensorType, ops
from weft.ir.recipes import Source
from weft.ir.recipes.readers import MemoryReader
from weft.ir.types import dtypes
from weft.passes.library.cache.cache_scales import HEADROOM, fit_scale, get_remainder

from ...models import BATCH, SEQ, applied


def test_codes_of_8_bits_reach_a_tenth_beyond_the_largest_number() -> None:
    x = np.random.default_rng(0).standard_normal((50, 3, 4))
    ones = np.ones((50, 3, 1))
    largest = np.abs(x).max(0)
    np.testing.assert_allclose(fit_scale(x, 8, "channel", ones), HEADROOM * largest.reshape(-1) / 127, rtol=1e-6)
    by_head = fit_scale(x, 8, "head", ones).reshape(3, 4)
    np.testing.assert_allclose(by_head, HEADROOM * largest.max(1, keepdims=True).repeat(4, 1) / 127, rtol=1e-6)
    np.testing.assert_allclose(fit_scale(x, 8, "tensor", ones), [HEADROOM * largest.max() / 127], rtol=1e-6)


def test_codes_of_4_bits_cost_the_least_of_what_is_tried() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((400, 2, 2)), rng.uniform(0, 1, (400, 2, 2)) ** 4

    def cost(scale: np.ndarray) -> np.ndarray:
        return (weight * (np.clip(np.round(x / scale), -8, 7) * scale - x) ** 2).sum(0)

    found = fit_scale(x, 4, "channel", weight).reshape(2, 2)
    for factor in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0):
        tried = np.abs(x).max(0) * factor / 7
        assert (cost(found) <= cost(tried) * (1 + 1e-5)).all()
    assert (cost(found) < 0.9 * cost(np.abs(x).max(0) / 7)).all()


def test_channel_of_zeros_has_a_positive_scale() -> None:
    found = fit_scale(np.zeros((5, 1, 4)), 4, "channel", np.ones((5, 1, 1)))
    assert (found > 0).all()


def test_key_scales_cover_rotations_to_any_position() -> None:
    """A key pair that only later positions turn into its second number: its scale knows of that."""
    graph = Graph("turned")
    ids = graph.add_input("input_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    at = graph.add_input("position_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    table = np.tile(np.array([[1.0, 0.0]]), (7, 1))
    graph.reader = MemoryReader({"table": table.astype(np.float32), "slow": np.array([1e-3], np.float32)})
    graph.meta |= {"kind": "decoder", "context": 2000}
    k = ops.embedding(ids, graph.add_param("table", TensorType(dtypes.f32, (7, 2)), Source("table")))
    slow = graph.add_param("slow", TensorType(dtypes.f32, (1,)), Source("slow"))
    turned = ops.rope(k, at, slow, heads=1)
    graph.add_output("y", ops.attention(turned, turned, k, heads=1, kv_heads=1, causal=True))
    after = applied("quantize-cache", graph)
    scale = after.params["k_scale"].recipe.evaluate(after.reader) * 127 / HEADROOM
    # 64 tokens turn by 0.06 at most; 2,000 by more than a quarter turn.
    np.testing.assert_allclose(scale, [1, 1], atol=0.02)


def test_first_tokens_are_stored_exactly() -> None:
    """Far more attention goes there than its share of tokens, so that a scale alone would be made for it."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 2, 4))
    first = rng.standard_normal((2, 4)) * 2
    x[::100] = first
    weight = np.ones((500, 2, 1))
    weight[::100] = 1000
    scale = fit_scale(x, 4, "channel", weight, first).reshape(2, 4)
    left = get_remainder(first, scale, 4)
    codes = (first - left) / scale
    np.testing.assert_allclose(codes, np.rint(codes), atol=1e-5)
    assert (np.abs(left) <= scale / 2 + 1e-6).all()

    def errors(scale: np.ndarray, left: np.ndarray | float) -> float:
        moved = x - left
        return float((weight * (np.clip(np.rint(moved / scale), -8, 7) * scale - moved) ** 2).sum())

    alone = fit_scale(x, 4, "channel", weight).reshape(2, 4)
    assert errors(scale, left) < 0.85 * errors(alone, 0)

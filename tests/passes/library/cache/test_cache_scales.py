"""Scales of cached keys and values: fitted to the largest value, or to the smallest error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.ir import Graph, TensorType, interpret, ops
from weft.ir.graph import Node
from weft.ir.recipes import Source
from weft.ir.recipes.readers import MemoryReader
from weft.ir.types import dtypes
from weft.passes.edits.edit import rebuild_node
from weft.passes.library.cache.cache_scales import (
    HEADROOM,
    RIDGE,
    Granularity,
    HeadMap,
    balance_moments,
    build_rotation,
    fit_scale,
    get_remainder,
)

from ....e2e.random_models import strong
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


RNG = np.random.default_rng(0)


def moments(heads: int, width: int) -> np.ndarray:
    """Second moments of numbers of very different sizes, that hang together."""
    x = RNG.standard_normal((heads, 6 * width, width)) @ RNG.standard_normal((heads, width, width))
    x *= np.geomspace(0.05, 20, width)
    return np.asarray(x.swapaxes(1, 2) @ x)


def cost(matrix: np.ndarray, keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Squares of errors of scores, by head, where each channel is rounded to steps as wide as its numbers."""
    back = np.linalg.inv(matrix)
    stored = np.einsum("hic,hij,hjc->hc", matrix, keys, matrix)
    met = np.einsum("hci,hij,hcj->hc", back, queries, back)
    return np.asarray((stored * met).sum(1))


@pytest.mark.parametrize("width", [4, 8, 12])
def test_balanced_keys_cost_the_least(width: int) -> None:
    keys, queries = moments(3, width), moments(3, width)
    own = cost(balance_moments(keys, queries), keys, queries)
    # The least is (Σ √λ)² / width, λ the eigenvalues of the product of both moments.
    shared = np.linalg.eigvals(keys @ queries).real
    least = np.sqrt(shared).sum(1) ** 2 / width
    assert (own >= least * (1 - 1e-9)).all()
    assert (own <= least * (1.1 if width != 12 else 2)).all()  # an odd rest is turned at random
    for other in (np.eye(width), build_rotation(width).evaluate(MemoryReader({})), RNG.standard_normal((width, width))):
        assert (own < cost(np.broadcast_to(other, keys.shape), keys, queries)).all()


def test_constant_keys_have_an_invertible_map() -> None:
    """A ridge keeps moments of rank 0 or 1 invertible."""
    one = np.zeros((1, 4, 4))
    one[0, 0, 0] = 1
    for keys, queries in ((one, one), (np.zeros((1, 4, 4)), one), (np.zeros((1, 4, 4)), np.zeros((1, 4, 4)))):
        matrix = balance_moments(keys, queries)
        assert np.isfinite(matrix).all()
        np.testing.assert_allclose(matrix @ np.linalg.inv(matrix), np.eye(4)[None], atol=1e-6 / RIDGE)


def test_output_shift_is_subtracted_after_the_map() -> None:
    x = RNG.standard_normal((5, 2, 4))
    map = HeadMap(RNG.standard_normal((2, 4)), RNG.standard_normal((2, 4, 4)))
    left = RNG.standard_normal((2, 4))
    np.testing.assert_allclose(map.shift_outputs(left)(x), map(x) - left, atol=1e-5)


def attentions(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op is ops.attention]


def model(softcap: float | None = None, sinks: bool = False) -> Graph:
    attention = Attention(heads=4, kv_heads=2, rope=RoPE(), softcap=softcap, sinks=sinks)
    return strong(Decoder(23, 16, 2, Block(attention, GatedMLP(24), norm=RMSNorm())).graph())


@pytest.mark.parametrize(
    ("how", "shifts"),
    [({}, {"k_shift", "v_shift"}), ({"softcap": 5.0}, {"v_shift"}), ({"sinks": True}, set())],
    ids=["plain", "soft cap", "sinks"],
)
def test_shifts_of_keys_and_values_keep_outputs(how: dict[str, Any], shifts: set[str]) -> None:
    graph = model(**how)
    after = applied("quantize-cache{bits=4}", graph)
    names = {name.rpartition(".")[2] for name in after.params if name.rpartition(".")[0] in ("layers.0.attn",)}
    assert names & {"k_shift", "v_shift"} == shifts
    assert {"k_map", "q_map", "v_map", "o_map", "k_scale", "v_scale"} <= names
    # Without codes it is the same function.
    for node in attentions(after):
        node.attrs["cache_bits"] = None
        for name in ("k_scale", "v_scale"):
            node.set_input(node.op.operand_index(name), None) if node.operand(name) is not None else None
    inputs = {"input_ids": RNG.integers(0, 23, (2, 9)), "position_ids": np.tile(np.arange(9), (2, 1))}
    wanted = interpret(graph, inputs)["logits"]
    np.testing.assert_allclose(interpret(after, inputs)["logits"], wanted, atol=1e-5 * np.abs(wanted).max())


def test_codes_of_8_bits_need_no_maps() -> None:
    after = applied("quantize-cache", model())
    assert not [name for name in after.params if name.endswith("_map")]


@pytest.mark.parametrize("per", ["channel", "head", "tensor"])
def test_outliers_of_keys_cost_little(per: Granularity) -> None:
    """Keys that stand far from zero, each channel by its own, and move little around there."""
    rng, width, n = np.random.default_rng(3), 16, 40
    sizes = np.geomspace(0.2, 4, width)
    table, offset = rng.standard_normal((50, width)) * sizes, 6 * rng.standard_normal(width) * sizes
    graph = Graph("outliers")
    ids = graph.add_input("input_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    given = {"q": rng.standard_normal((50, width)) / 3, "k": table + offset, "v": rng.standard_normal((50, width))}
    weights = {name: x.astype(np.float32) for name, x in given.items()} | _nearest(given, per)
    graph.reader = MemoryReader(weights)
    graph.meta |= {"kind": "decoder"}
    q, k, v = (
        ops.embedding(ids, graph.add_param(name, TensorType(dtypes.f32, x.shape), Source(name)))
        for name, x in given.items()
    )
    graph.add_output("y", ops.attention(q, k, v, heads=1, kv_heads=1, causal=True))
    inputs = {"input_ids": rng.integers(0, 50, (1, n))}
    exact = interpret(graph, inputs)["y"]

    def lost(after: Graph) -> float:
        return float(np.square(interpret(after, inputs)["y"] - exact).mean() / np.square(exact).mean())

    plain = graph.clone()
    (node,) = attentions(plain)
    scales = (
        plain.add_param(name, TensorType(dtypes.f32, weights[name].shape), Source(name))
        for name in ("k_scale", "v_scale")
    )
    rebuild_node(node, dict(zip(("k_scale", "v_scale"), scales, strict=True)), cache_bits=4)
    assert lost(applied(f"quantize-cache{{bits=4, per={per}}}", graph)) < 0.75 * lost(plain)


def _nearest(given: dict[str, np.ndarray], per: Granularity) -> dict[str, np.ndarray]:
    """Scales of keys and values as they are."""
    ones = np.ones((50, 1, 1))
    return {f"{name}_scale": fit_scale(given[name][:, None], 4, per, ones) for name in "kv"}

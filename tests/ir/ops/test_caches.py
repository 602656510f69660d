"""Slots of rolling caches, and codes of quantized ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.ir import Graph, TensorType, WeftError, interpret, ops
from weft.ir.ops import caches
from weft.ir.schema.states import CODES
from weft.ir.types import dtypes

from .attention_oracle import quantize_to_codes, write_rolling_cache

CAPACITY = 5


def simulate(newest: int, keep: int) -> list[int | None]:
    """Return the position in each slot after positions 0 to `newest` were written one by one."""
    slots: list[int | None] = [None] * CAPACITY
    for position in range(newest + 1):
        slots[position if position < keep else keep + (position - keep) % (CAPACITY - keep)] = position
    return slots


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("newest", [0, 1, 4, 5, 11])
def test_slots_hold_the_latest_positions(newest: int, keep: int) -> None:
    graph = Graph()
    at = graph.add_input("newest", TensorType(dtypes.i64, (1, 1)))
    slot = ops.unsqueeze(ops.iota(graph.add_input("slots", TensorType(dtypes.f32, (CAPACITY,))), axis=0), axes=(0,))
    graph.add_output("y", caches.emit_slot_positions(slot, at, keep))
    feeds = {"newest": np.array([[newest]]), "slots": np.zeros(CAPACITY)}
    for found in (caches.find_slot_positions(feeds["newest"], CAPACITY, keep), interpret(graph, feeds)["y"]):
        assert [p if 0 <= p <= newest else None for p in found[0].tolist()] == simulate(newest, keep)


@pytest.mark.parametrize("keep", [0, 2])
def test_rolling_writes_equal_writes_one_by_one(keep: int) -> None:
    cache, positions = np.full((1, CAPACITY, 1), -1.0), np.arange(12)
    new = positions[None, :, None].astype(float)
    for start, stop in ((0, 3), (3, 4), (4, 12)):
        cache = write_rolling_cache(cache, new[:, start:stop], positions[start:stop], stop - 1, keep)
        assert cache.reshape(-1).tolist() == [-1 if p is None else p for p in simulate(stop - 1, keep)]


def test_positions_after_the_last_are_not_written() -> None:
    new = np.arange(1.0, 5.0).reshape(1, 4, 1)
    cache = write_rolling_cache(np.zeros((1, CAPACITY, 1)), new, np.arange(4), 1, 0)
    assert cache.reshape(-1).tolist() == [1, 2, 0, 0, 0]


def test_codes_are_rounded_half_to_even_and_clipped() -> None:
    assert (caches.get_code_range(4), caches.get_code_range(8)) == ((-8, 7), (-128, 127))
    x = np.array([0.25, 0.75, -9.0, 9.0]).reshape(1, 1, 1, 4)
    assert quantize_to_codes(x, np.array([0.5]), 4).reshape(-1).tolist() == [0, 2, -8, 7]
    per_channel = quantize_to_codes(x.reshape(1, 2, 1, 2), np.array([0.25, 0.25, 3.0, 9.0]), 4)
    assert per_channel.reshape(-1).tolist() == [1, 3, -3, 1]


@pytest.mark.parametrize("width", [1, 4])
def test_emitted_codes_equal_those_of_numpy(width: int, rng: np.random.Generator) -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(dtypes.f32, (2, 3, 4)))
    scale = graph.add_input("scale", TensorType(dtypes.f32, (width,)))
    codes = caches.emit_codes(x, scale, 8, CODES[8])
    by_head = ops.transpose(ops.reshape(codes, shape=(2, 3, 2, 2)), axes=(0, 2, 1, 3))
    graph.add_output("codes", by_head)
    graph.add_output("values", caches.emit_dequantized(by_head, scale, 2, x))
    feeds = {"x": rng.standard_normal((2, 3, 4)), "scale": rng.uniform(0.01, 0.02, width)}
    found = interpret(graph, feeds)
    heads = feeds["x"].reshape(2, 3, 2, 2).transpose(0, 2, 1, 3)
    wanted = quantize_to_codes(heads, feeds["scale"], 8)
    np.testing.assert_array_equal(found["codes"], wanted)
    scales = np.broadcast_to(feeds["scale"], 4).reshape(1, 2, 1, 2)
    np.testing.assert_allclose(found["values"], wanted * scales)


@pytest.mark.parametrize(
    ("bits", "changes", "message"),
    [
        (None, {}, "k_scale and v_scale are given without cache_bits="),
        (5, {}, "cache_bits=5: codes have 8 or 4 bits"),
        (8, {"causal": False}, "cache_bits= needs causal=true"),
        (8, {"k_scale": (3,)}, r"must be \[1\] or \[6\], for the channels of f32\[2, 4, 6\]"),
        (8, {"v": None}, "v_scale needs the operand v"),
        (4, {}, "codes of 4 bits need heads of an even size"),
    ],
)
def test_settings_of_quantized_caches_that_do_not_fit(bits: int | None, changes: dict[str, Any], message: str) -> None:
    x = TensorType(dtypes.f32, (2, 4, 6))
    scales = {"k_scale": x.with_shape(*changes.get("k_scale", (1,))), "v_scale": x.with_shape(6)}
    with pytest.raises(WeftError, match=message):
        caches.check_quantization(bits, x, changes.get("v", x), {**scales}, changes.get("causal", True), 2)
    caches.check_quantization(8, x, x, {"k_scale": x.with_shape(1), "v_scale": x.with_shape(6)}, True, 2)

"""GPTQ and AWQ: words packed by hand, zero points that are one too small, act-order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.formats.hf.quantized.gptq import read_awq, read_gptq, unpack_zero_points
from weft.ir import MemoryReader, WeftError

RNG = np.random.default_rng(0)
CODES = RNG.integers(0, 16, (16, 8))  # [in, out], groups of 8 inputs
ZEROS = RNG.integers(1, 16, (2, 8))
SCALES = RNG.standard_normal((2, 8)).astype(np.float16)
WEIGHT = (SCALES.astype(np.float32).repeat(8, 0) * (CODES - ZEROS.repeat(8, 0))).T


def pack(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Pack the 4-bit codes [n, 8 · words] into words [n, words]; position k of a word has code order[k]."""
    by_word = codes.reshape(len(codes), -1, 8)[..., list(order)].astype(np.uint64)
    return (by_word << np.arange(0, 32, 4, dtype=np.uint64)).sum(-1).astype(np.uint32).view(np.int32)


def gptq(lag: int, **more: np.ndarray) -> MemoryReader:
    stored = {"m.qweight": pack(CODES.T).T.copy(), "m.scales": SCALES, "m.qzeros": pack(ZEROS - lag)}
    return MemoryReader({**stored, **more})


@pytest.mark.parametrize(("form", "lag"), [("gptq", 1), ("gptq_v2", 0)])
def test_gptq_weights(form: str, lag: int) -> None:
    reader = gptq(lag)
    tensor = read_gptq(reader, list(reader.keys()), {"bits": 4, "group_size": 8, "checkpoint_format": form})["m.weight"]
    np.testing.assert_array_equal(tensor.read(reader, 0, 8), WEIGHT)
    np.testing.assert_array_equal(tensor.read(reader, 3, 5), WEIGHT[3:5])
    assert set(tensor.parts) == {"m.qweight", "m.scales", "m.qzeros"}


def test_gptq_act_order() -> None:
    index = np.arange(16, dtype=np.int32) % 2
    reader = gptq(0, **{"m.g_idx": index})
    scheme = {"bits": 4, "group_size": 8, "checkpoint_format": "gptq_v2", "desc_act": True}
    tensor = read_gptq(reader, list(reader.keys()), scheme)["m.weight"]
    wanted = (SCALES.astype(np.float32)[index] * (CODES - ZEROS[index])).T
    np.testing.assert_array_equal(tensor.read(reader, 0, 8), wanted)


@pytest.mark.parametrize(("bits", "word"), [(4, 0x76543210), (8, 0x03020100), (2, 0x1B)])
def test_ones_are_added_back_to_entire_words(bits: int, word: int) -> None:
    count = 32 // bits
    points = [word >> bits * i & (1 << bits) - 1 for i in range(count)]
    ones = sum(1 << bits * i for i in range(count))
    stored = np.array([[(word - ones) % (1 << 32)]], np.uint32).view(np.int32)  # a 0 borrows from the next point
    np.testing.assert_array_equal(unpack_zero_points(stored, bits, 1, count), [points])


def test_awq_orders_eight_outputs_in_a_word() -> None:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {"m.qweight": pack(CODES, order), "m.scales": SCALES, "m.qzeros": pack(ZEROS, order)}
    reader = MemoryReader(stored)
    tensor = read_awq(reader, list(stored), {"bits": 4, "group_size": 8, "version": "gemm"})["m.weight"]
    np.testing.assert_array_equal(tensor.read(reader, 0, 8), WEIGHT)
    np.testing.assert_array_equal(tensor.read(reader, 2, 7), WEIGHT[2:7])


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"bits": 5}, "bits=5 is not supported"),
        ({"bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported"),
        ({"bits": 4, "group_size": 0}, "group_size=0 must be a positive integer, or -1"),
        ({"bits": 4, "group_size": 4}, r"qweight must be i32 .* \[in / 4, out\]"),
        ({"bits": 4, "group_size": 8, "desc_act": True}, "there is no 'm.g_idx' next to 'm.qweight'"),
    ],
)
def test_refusals(scheme: dict[str, Any], message: str) -> None:
    reader = gptq(1)
    with pytest.raises(WeftError, match=message):
        read_gptq(reader, list(reader.keys()), scheme)

"""Integers with a scale per group: values, zero points, act-order, block layouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from weft.frontends.formats.hf.quantized.codes import Integers, find_group, has_act_order, is_scale_dtype, to_bytes
from weft.ir import MemoryReader, WeftError
from weft.ir.types import dtypes

CODES = np.arange(64, dtype=np.uint8).reshape(2, 32) % 16
SCALES = np.array([[1.0, 2.0], [0.5, 4.0]], np.float32)
ZEROS = np.array([[3, 5], [8, 15]], np.uint8)


@dataclass(frozen=True)
class Given(Integers):
    """Codes, scales and zero points in memory."""

    given: Any = field(default=None, compare=False)

    def codes(self, reader: Any, start: int, stop: int) -> np.ndarray:
        return CODES[start:stop]

    def scales(self, reader: Any, start: int, stop: int) -> np.ndarray:
        return (SCALES if self.given is None else self.given)[start:stop]

    def zeros(self, reader: Any, start: int, stop: int) -> np.ndarray:
        return ZEROS[start:stop]


EMPTY = MemoryReader({})
KEYS = {"codes": "codes", "scales": "scales"}


def test_values_are_scaled_distances_from_the_zero_point() -> None:
    wanted = SCALES.repeat(16, 1) * (CODES.astype(np.float32) - ZEROS.repeat(16, 1))
    np.testing.assert_array_equal(Given(KEYS, 2, 32, 4, 16, dtypes.f16, True, "").read(EMPTY, 0, 2), wanted)
    plain = Given(KEYS, 2, 32, 4, 16, dtypes.f16, False, "").read(EMPTY, 1, 2)
    np.testing.assert_array_equal(plain, (SCALES.repeat(16, 1) * (CODES.astype(np.float32) - 8))[1:])


def test_act_order_lists_the_group_of_each_input() -> None:
    index = np.arange(32) % 2
    tensor = Given(KEYS, 2, 32, 4, 16, dtypes.f16, True, "g_idx")
    found = tensor.read(MemoryReader({"g_idx": index.astype(np.int32)}), 0, 2)
    np.testing.assert_array_equal(found, SCALES[:, index] * (CODES.astype(np.float32) - ZEROS[:, index]))
    assert tensor.layout is None and tensor.dtype(EMPTY).name == "uint4_g16_act_order"
    with pytest.raises(WeftError, match="'codes' has no block layout"):
        tensor.read_blocks(EMPTY, 0, 2)


def test_blocks_dequantize_to_the_same_values() -> None:
    tensor = Given(KEYS, 2, 32, 4, 16, dtypes.f16, True, "")
    layout = tensor.layout
    assert layout is not None
    found = layout.dequantize(layout.unpack(tensor.read_blocks(EMPTY, 0, 2)))
    np.testing.assert_allclose(found.reshape(2, 32), tensor.read(EMPTY, 0, 2), rtol=1e-3)


def test_scales_must_be_finite() -> None:
    with pytest.raises(WeftError, match="a scale in 'scales' is not finite"):
        Given(KEYS, 2, 32, 4, 16, dtypes.f16, True, "", SCALES * np.inf).read(EMPTY, 0, 1)


@pytest.mark.parametrize(("group", "stored"), [(128, 128), (256, 256), (1024, 128), (96, 32), (40, 40), (12, 0)])
def test_groups_are_split_to_supported_sizes(group: int, stored: int) -> None:
    assert find_group(group) == stored


def test_words_are_read_lowest_byte_first() -> None:
    np.testing.assert_array_equal(to_bytes(np.array([[0x04030201]], np.int32)), [[1, 2, 3, 4]])


def test_consecutive_groups_are_no_act_order() -> None:
    reader = MemoryReader({"even": np.array([0, 0, 1, 1]), "odd": np.array([0, 1, 0, 1]), "unset": np.full(4, -1)})
    assert not has_act_order(reader, "even", 4, 2, 2) and not has_act_order(reader, "unset", 4, 2, 2, unset=-1)
    assert has_act_order(reader, "odd", 4, 2, 2)
    assert is_scale_dtype(dtypes.bf16) and not is_scale_dtype(dtypes.i8)

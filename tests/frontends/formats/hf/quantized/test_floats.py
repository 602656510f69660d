"""Small floats: MXFP4 experts, 4-bit matrices, 8-bit tiles, against values worked out by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from weft.frontends.formats.hf.quantized.floats import read_float4, read_fp8, read_mxfp4
from weft.ir import MemoryReader, WeftError
from weft.ir.types import dtypes

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
RNG = np.random.default_rng(0)


def test_mxfp4_experts_are_transposed_and_scaled_by_powers_of_two() -> None:
    codes, exponents = RNG.integers(0, 256, (2, 3, 1, 16), np.uint8), RNG.integers(120, 134, (2, 3, 1), np.uint8)
    reader = MemoryReader({"w_blocks": codes, "w_scales": exponents})
    tensor = read_mxfp4(reader, list(reader.keys()), {})["w"]
    values = E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(2, 3, 32)
    wanted = (values * 2.0 ** (exponents.astype(float) - 127)).swapaxes(1, 2)
    np.testing.assert_array_equal(tensor.read(reader, 0, 2), wanted)
    assert tensor.shape(reader) == (2, 32, 3)


def test_mxfp4_scales_must_fit() -> None:
    reader = MemoryReader({"w_blocks": np.zeros((2, 3, 1, 16), np.uint8), "w_scales": np.zeros((2, 3), np.uint8)})
    with pytest.raises(WeftError, match="do not fit together: "):
        read_mxfp4(reader, list(reader.keys()), {})


def test_nvfp4_scales_are_divided_by_a_scale_of_the_matrix() -> None:
    codes = RNG.integers(0, 256, (2, 16), np.uint8)
    scales = np.array([[1, 2], [4, 0.5]]).astype(ml_dtypes.float8_e4m3fn)
    stored = {"m.weight_packed": codes, "m.weight_scale": scales, "m.weight_global_scale": np.array([4.0], np.float32)}
    reader = MemoryReader(stored)
    tensor = read_float4(reader, "m.weight_packed", "m", list(stored))
    values = E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(2, 32)
    wanted = values * scales.astype(np.float32).repeat(16, 1) / 4
    np.testing.assert_array_equal(tensor.read(reader, 0, 2).reshape(2, 32), wanted)
    assert tensor.shape(reader) == (2, 32)
    with pytest.raises(WeftError, match=r"there is no 'm.weight_global_scale'"):
        read_float4(reader, "m.weight_packed", "m", ["m.weight_packed", "m.weight_scale"])


def test_fp8_tiles_may_end_inside_the_last_tile() -> None:
    values = RNG.standard_normal((5, 7)).astype(ml_dtypes.float8_e4m3fn)
    scales = RNG.standard_normal((2, 3)).astype(np.float32)
    reader = MemoryReader({"w": values, "w_scale_inv": scales})
    tensor = read_fp8(reader, list(reader.keys()), {"weight_block_size": [4, 3]})["w"]
    wanted = values.astype(np.float32) * scales.repeat(4, 0)[:5].repeat(3, 1)[:, :7]
    np.testing.assert_array_equal(tensor.read(reader, 0, 5), wanted)
    np.testing.assert_array_equal(tensor.read(reader, 3, 5), wanted[3:])


def test_fp8_rows_in_blocks_of_128_keep_their_codes() -> None:
    values, scales = np.ones((2, 128)).astype(ml_dtypes.float8_e4m3fn), np.array([[3.0]], np.float32)
    reader = MemoryReader({"w": values, "w_scale_inv": scales})
    tensor = read_fp8(reader, list(reader.keys()), {})["w"]
    assert tensor.dtype(reader) is dtypes.f8e4m3_128
    blocks = tensor.read_blocks(reader, 0, 2)
    np.testing.assert_array_equal(blocks[0, 0, :4].view(np.float32), [3.0])
    np.testing.assert_array_equal(blocks[0, 0, 4:], values.view(np.uint8)[0])


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"weight_block_size": [128]}, r"weight_block_size=\[128\] must be two positive integers"),
        ({"activation_scheme": "static"}, "activation_scheme='static' is not supported, only 'dynamic'"),
        ({"weight_block_size": [1, 1]}, "one for each tile of 1 · 1"),
    ],
)
def test_fp8_refusals(scheme: dict[str, Any], message: str) -> None:
    reader = MemoryReader({"w": np.ones((2, 2), ml_dtypes.float8_e4m3fn), "w_scale_inv": np.ones((1, 1), np.float32)})
    with pytest.raises(WeftError, match=message):
        read_fp8(reader, list(reader.keys()), scheme)

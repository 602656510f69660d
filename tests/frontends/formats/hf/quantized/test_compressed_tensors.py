"""compressed-tensors: packed words with and without crossing codes, bytes, tiles, schemes that are refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from weft.frontends.formats.hf.quantized.compressed_tensors import find_activation_keys, read_compressed
from weft.ir import MemoryReader, WeftError

RNG = np.random.default_rng(0)


def scheme(bits: int, form: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    return {"format": form, "config_groups": {"group_0": {"weights": {"num_bits": bits}}}, **more}


def pack(codes: np.ndarray, bits: int, stream: bool) -> np.ndarray:
    """Pack each row's unsigned codes into words, from the lowest bit on; if not `stream`, codes do not cross words."""
    rows = []
    for row in codes.tolist():
        step = 32 if stream else 32 // bits
        chunks = [row] if stream else [row[i : i + step] for i in range(0, len(row), step)]
        words: list[int] = []
        for chunk in chunks:
            number = sum(code << bits * i for i, code in enumerate(chunk))
            words += [number >> 32 * k & 0xFFFFFFFF for k in range(-(-len(chunk) * bits // 32))]
        rows.append(words)
    return np.array(rows, np.uint32).view(np.int32)


@pytest.mark.parametrize(("bits", "stream"), [(4, True), (8, True), (3, True), (5, True), (3, False)])
def test_packed_integers(bits: int, stream: bool) -> None:
    codes, scales = RNG.integers(0, 1 << bits, (2, 32)), RNG.standard_normal((2, 2)).astype(np.float32)
    stored = {
        "m.weight_packed": pack(codes, bits, stream),
        "m.weight_scale": scales,
        "m.weight_shape": np.array([2, 32], np.int64),
    }
    reader = MemoryReader(stored)
    tensor = read_compressed(reader, list(stored), scheme(bits))["m.weight"]
    wanted = scales.repeat(16, 1) * (codes - (1 << bits - 1)).astype(np.float32)
    np.testing.assert_array_equal(tensor.read(reader, 0, 2), wanted)


def test_zero_points_are_packed_along_the_outputs() -> None:
    codes, zeros = RNG.integers(0, 16, (8, 16)), RNG.integers(0, 16, (8, 2))
    stored = {
        **{"m.weight_packed": pack(codes, 4, True), "m.weight_scale": np.ones((8, 2), np.float32)},
        "m.weight_shape": np.array([8, 16], np.int64),
        "m.weight_zero_point": pack(zeros.T, 4, True).T.copy(),
    }
    reader = MemoryReader(stored)
    tensor = read_compressed(reader, list(stored), scheme(4))["m.weight"]
    np.testing.assert_array_equal(tensor.read(reader, 3, 6), (codes - zeros.repeat(8, 1))[3:6].astype(np.float32))


@pytest.mark.parametrize("scales", [np.float32([[2.0]]), np.float32([[2.0], [3.0]]), np.float32([[1, 2], [3, 4]])])
def test_bytes_have_a_scale_per_tensor_row_or_group(scales: np.ndarray) -> None:
    codes = RNG.integers(-128, 128, (2, 16)).astype(np.int8)
    reader = MemoryReader({"m.weight": codes, "m.weight_scale": scales})
    tensor = read_compressed(reader, list(reader.keys()), scheme(8, "int-quantized"))["m.weight"]
    wanted = codes.astype(np.float32) * np.broadcast_to(scales.repeat(16 // scales.shape[1], 1), (2, 16))
    np.testing.assert_array_equal(tensor.read(reader, 0, 2), wanted)


def test_floats_in_tiles_of_the_scheme() -> None:
    codes = RNG.standard_normal((3, 4)).astype(ml_dtypes.float8_e4m3fn)
    scales = RNG.standard_normal((2, 2)).astype(np.float32)
    reader = MemoryReader({"m.weight": codes, "m.weight_scale": scales})
    group = {"weights": {"num_bits": 8, "block_structure": [2, 2]}}
    tiles = {"format": "float-quantized", "config_groups": {"g": group}}
    tensor = read_compressed(reader, list(reader.keys()), tiles)["m.weight"]
    wanted = codes.astype(np.float32) * scales.repeat(2, 0)[:3].repeat(2, 1)
    np.testing.assert_array_equal(tensor.read(reader, 0, 3), wanted)


def test_scales_of_activations_are_found() -> None:
    assert find_activation_keys(["m.input_scale", "m.weight_scale", "a.k_scale"]) == {"m.input_scale", "a.k_scale"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config_groups must map at least one group"),
        (scheme(4, "marlin-24"), "format='marlin-24' is not supported"),
        (scheme(9), "num_bits=9 of config group 'group_0' must be an integer from 2 to 8"),
        (scheme(4, sparsity_config={"format": "sparse-bitmask"}), "is not supported, only 'dense'"),
        (scheme(4, transform_config={"config_groups": {"r": 1}}), "transform_config is not supported"),
        (scheme(8), "'m.weight' is f32, but its scale needs i8 or f8e4m3"),
    ],
)
def test_refusals(config: dict[str, Any], message: str) -> None:
    reader = MemoryReader({"m.weight": np.ones((2, 2), np.float32), "m.weight_scale": np.ones((2, 1), np.float32)})
    with pytest.raises(WeftError, match=message):
        read_compressed(reader, list(reader.keys()), config)

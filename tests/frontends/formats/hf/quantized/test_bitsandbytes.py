"""bitsandbytes: codes into a table with one or two levels of scales, and rows of bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from weft.frontends.formats.hf.quantized.bitsandbytes import read_bnb
from weft.ir import MemoryReader, WeftError

RNG = np.random.default_rng(0)
TABLE = np.sort(RNG.standard_normal(16)).astype(np.float32)
CODES = RNG.integers(0, 16, 5 * 6)  # a weight [5, 6] in blocks of 8: the last one is not full
PACKED = (CODES[::2] << 4 | CODES[1::2]).astype(np.uint8)[:, None]  # the first code in the high half
STATE = "w.quant_state.bitsandbytes__nf4"


def stored(nested: bool, **state: Any) -> tuple[MemoryReader, np.ndarray]:
    """Return the tensors of a weight [5, 6], and its value."""
    settings: dict[str, Any] = {"shape": [5, 6], "blocksize": 8, **state}
    arrays: dict[str, np.ndarray] = {"w": PACKED, "w.quant_map": TABLE}
    if nested:
        levels, outer = RNG.standard_normal(256).astype(np.float32), np.float32([2.0, 3.0])
        inner = RNG.integers(0, 256, 4).astype(np.uint8)
        settings |= {"nested_blocksize": 2, "nested_offset": 0.5}
        arrays |= {"w.absmax": inner, "w.nested_absmax": outer, "w.nested_quant_map": levels}
        scales = levels[inner] * outer.repeat(2) + np.float32(0.5)
    else:
        scales = arrays["w.absmax"] = RNG.standard_normal(4).astype(np.float32)
    arrays[STATE] = np.frombuffer(json.dumps(settings).encode(), np.uint8)
    return MemoryReader(arrays), (TABLE[CODES] * scales.repeat(8)[:30]).reshape(5, 6)


@pytest.mark.parametrize("nested", [False, True])
def test_codes_index_a_table_and_blocks_have_scales(nested: bool) -> None:
    reader, wanted = stored(nested)
    tensor = read_bnb(reader, list(reader.keys()), {})["w"]
    np.testing.assert_allclose(tensor.read(reader, 0, 5), wanted, rtol=1e-6)
    np.testing.assert_allclose(tensor.read(reader, 2, 4), wanted[2:4], rtol=1e-6)
    assert set(tensor.parts) == set(reader.keys()) and tensor.shape(reader) == (5, 6)


def test_rows_of_bytes_are_scaled_by_their_largest_magnitude() -> None:
    codes, largest = RNG.integers(-127, 128, (3, 4)).astype(np.int8), np.float32([1.0, 2.0, 127.0])
    reader = MemoryReader({"m.weight": codes, "m.SCB": largest})
    tensor = read_bnb(reader, list(reader.keys()), {})["m.weight"]
    wanted = codes * (largest / np.float32(127))[:, None]
    np.testing.assert_allclose(tensor.read(reader, 0, 3), wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"w.quant_state.bitsandbytes__int3": np.zeros(1, np.uint8)},
            "is of the kind int3; weft reads only nf4 and fp4",
        ),
        ({STATE: np.zeros(2, np.float32)}, "has dtype f32, but must hold JSON as u8"),
        ({STATE: np.frombuffer(b'{"shape": [5], "blocksize": 0}', np.uint8)}, "has no valid shape and block size"),
        ({"w.absmax": np.ones(3, np.float32)}, r"codes must be u8 \[15, 1\], absmax f32 \[4\]"),
        ({"m.SCB": np.ones(3, np.float32)}, "there is no 'm.weight' next to 'm.SCB'"),
        ({"v.quant_map": TABLE}, "'v.quant_map' has no quant_state tensor next to it"),
    ],
)
def test_refusals(changes: dict[str, np.ndarray], message: str) -> None:
    reader = MemoryReader({**stored(False)[0].arrays, **changes})
    with pytest.raises(WeftError, match=message):
        read_bnb(reader, list(reader.keys()), {})


def test_weights_not_stored_row_by_row_are_refused() -> None:
    arrays = {"m.weight": np.zeros((2, 4), np.int8), "m.SCB": np.ones(2, np.float32), "m.weight_format": np.uint8([1])}
    with pytest.raises(
        WeftError, match=r"is not stored row by row, as .* states: save the model with bitsandbytes 0.45"
    ):
        read_bnb(MemoryReader(arrays), list(arrays), {})

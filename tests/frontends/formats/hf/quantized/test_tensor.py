"""A reader that shows quantized tensors in place of their parts."""

from __future__ import annotations

import numpy as np
import pytest

from weft.frontends.formats.hf.quantized.floats import Tiles
from weft.frontends.formats.hf.quantized.tensor import (
    DequantizedReader,
    check_finite,
    misfit_error,
    read_all,
    require_key,
)
from weft.ir import MemoryReader, WeftError
from weft.ir.types import dtypes

ARRAYS = {
    "w_codes": np.arange(6, dtype=np.float32).reshape(2, 3),
    "w_scale": np.float32(2.0).reshape(1),
    "plain": np.ones(2, np.float32),
    "input_scale": np.ones(1, np.float32),
}
BASE = MemoryReader(ARRAYS)
READER = DequantizedReader(
    BASE, {"w": Tiles({"codes": "w_codes", "scales": "w_scale"}, (2, 3))}, frozenset(["input_scale"])
)


def test_parts_and_hidden_keys_are_replaced_by_the_tensor() -> None:
    assert set(READER.keys()) == {"plain", "w"}


def test_tensors_are_read_dequantized() -> None:
    np.testing.assert_array_equal(READER.read("w", 1, 2), [[6, 8, 10]])
    np.testing.assert_array_equal(READER.read("plain", 0, 2), [1, 1])
    assert (READER.shape("w"), READER.shape("plain"), READER.dtype("plain")) == ((2, 3), (2,), dtypes.f32)


def test_companions_must_exist() -> None:
    assert require_key("a", "b", {"b"}) == "b"
    with pytest.raises(WeftError, match="there is no 'b' next to 'a'; the checkpoint is incomplete"):
        require_key("a", "b", {"c"})


def test_scalars_are_read_with_their_shape() -> None:
    assert read_all(MemoryReader({"s": np.float32(3.0)}), "s").shape == ()
    assert read_all(BASE, "w_codes").shape == (2, 3)


def test_errors_show_dtypes_shapes_and_keys() -> None:
    message = str(misfit_error(BASE, "w_codes", "w_scale", expected="one each"))
    assert message == "w_codes f32 [2, 3] and w_scale f32 [1] do not fit together: one each"
    with pytest.raises(WeftError, match="a scale in 's' is not finite; the checkpoint is damaged"):
        check_finite(np.array([1.0, np.nan]), "s", BASE)

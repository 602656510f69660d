from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from weft.ir import WeftError
from weft.ir.types import dtypes

DENSE = [t for t in dtypes.ALL.values() if not t.is_block]
BLOCK = [t for t in dtypes.ALL.values() if t.is_block]


@pytest.mark.parametrize("dtype", dtypes.ALL.values(), ids=str)
def test_name_round_trips(dtype: dtypes.DType) -> None:
    assert dtypes.parse(dtype.name) is dtype
    assert repr(dtype) == dtype.name


@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_numpy_twin(dtype: dtypes.DType) -> None:
    array = np.zeros(3, dtype.numpy)
    assert dtypes.from_numpy(array) is dtype
    assert dtype.is_float + dtype.is_int + (dtype == dtypes.bool_) == 1
    if dtype.bits >= 8:
        assert dtype.bytes_for(5) == 5 * array.itemsize


@pytest.mark.parametrize("dtype", [t for t in DENSE if t.is_float], ids=str)
def test_eps_is_the_gap_after_one(dtype: dtypes.DType) -> None:
    one = np.array(1, dtype.numpy)
    assert (np.array(1 + dtype.eps).astype(dtype.numpy) > one).all()
    assert (np.array(1 + dtype.eps / 2).astype(dtype.numpy) == one).all()


def test_aliases() -> None:
    for alias, name in {"float16": "f16", "fp16": "f16", "bfloat16": "bf16", "float32": "f32", "fp32": "f32"}.items():
        assert dtypes.parse(alias).name == name


def test_unknown_name() -> None:
    with pytest.raises(WeftError, match="unknown dtype 'f12'; known are f64, f32"):
        dtypes.parse("f12")


def test_foreign_array() -> None:
    with pytest.raises(WeftError, match="complex128 has no counterpart"):
        dtypes.from_numpy(np.zeros(2, complex))


@pytest.mark.parametrize("dtype", [t for t in BLOCK if t.name.upper() in GGMLQuantizationType.__members__], ids=str)
def test_blocks_are_those_of_gguf(dtype: dtypes.DType) -> None:
    size = GGML_QUANT_SIZES[GGMLQuantizationType[dtype.name.upper()]]
    assert size == (dtype.block, dtype.block_bytes)
    assert dtype.bytes_for(3 * dtype.block) == 3 * dtype.block_bytes
    with pytest.raises(WeftError, match="block-quantized"):
        _ = dtype.numpy

"""torchao: classes and blocks in the metadata of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from weft.frontends.formats.hf.quantized.torchao import read_torchao
from weft.frontends.formats.hf.safetensors import SafetensorsReader
from weft.ir import WeftError

RNG = np.random.default_rng(0)
CODES = RNG.integers(-8, 8, (2, 8)).astype(np.int8)
SCALES = RNG.standard_normal((2, 2)).astype(np.float32)


def folder(path: Path, kind: str, data: dict[str, Any], **tensors: np.ndarray) -> SafetensorsReader:
    """Write a weight in parts and its class."""
    stored = {f"m._weight_{name}": array for name, array in {"qdata": CODES, "scale": SCALES, **tensors}.items()}
    metadata = {"m.weight": json.dumps({"_type": kind, "_data": data})} if kind else {}
    save_file(stored, path / "model.safetensors", metadata)
    return SafetensorsReader(path)


@pytest.mark.parametrize("zeros", [None, np.int8([[1, 2], [-3, 0]])])
def test_integers_have_a_scale_and_a_zero_point_per_group(zeros: np.ndarray | None, tmp_path: Path) -> None:
    data = {"block_size": [1, 4], "target_dtype": {"_data": "int4"}}
    more = {} if zeros is None else {"zero_point": zeros}
    reader = folder(tmp_path, "IntxUnpackedToInt8Tensor", data, **more)
    tensor = read_torchao(reader, list(reader.keys()), {})["m.weight"]
    shift = 0 if zeros is None else zeros.repeat(4, 1)
    np.testing.assert_array_equal(tensor.read(reader, 0, 2), SCALES.repeat(4, 1) * (CODES - shift).astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("AffineQuantizedTensor", {}, "m.weight is stored as AffineQuantizedTensor; weft reads Int8Tensor"),
        ("", {}, "m.weight is stored without the name of its class"),
        ("Int8Tensor", {"block_size": [1, 3]}, r"whole blocks of block_size=\[1, 3\]"),
        ("Int8Tensor", {}, "whole blocks of block_size=None"),
        (
            "Int8Tensor",
            {"block_size": [1, 4], "target_dtype": {"_data": "int9"}},
            r"whole blocks of block_size=\[1, 4\]",
        ),
    ],
)
def test_refusals(kind: str, data: dict[str, Any], message: str, tmp_path: Path) -> None:
    reader = folder(tmp_path, kind, data)
    with pytest.raises(WeftError, match=message):
        read_torchao(reader, list(reader.keys()), {})

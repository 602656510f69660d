"""The quantization method of a folder, and the keys of its scheme that nothing reads."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from weft.frontends.formats.hf.quantized.methods import METHODS, dequantize_reader, find_unread_scheme
from weft.frontends.models.config_keys import RecordingConfig
from weft.ir import MemoryReader, WeftError

FP8 = {
    "w.weight": np.arange(6).reshape(2, 3).astype(ml_dtypes.float8_e4m3fn),
    "w.weight_scale_inv": np.array([[2.0]], np.float32),
}


def test_folders_without_a_scheme_are_read_as_they_are() -> None:
    reader = MemoryReader({})
    assert dequantize_reader(reader, {}, "config.json") is reader


@pytest.mark.parametrize("scheme", ["fp8", {"quant_method": "fp8"}])
def test_weights_are_dequantized_by_the_stated_method(scheme: Any) -> None:
    found = dequantize_reader(MemoryReader(FP8), {"quantization_config": scheme}, "config.json")
    assert list(found.keys()) == ["w.weight"]
    np.testing.assert_array_equal(found.read("w.weight", 0, 2), [[0, 2, 4], [6, 8, 10]])


def test_first_bitsandbytes_configs_do_not_name_their_method() -> None:
    stored = {"w.SCB": np.ones(2, np.float32), "w.weight": np.full((2, 3), 127, np.int8)}
    found = dequantize_reader(MemoryReader(stored), {"quantization_config": {"load_in_8bit": True}}, "config.json")
    np.testing.assert_array_equal(found.read("w.weight", 0, 2), np.ones((2, 3)))


def test_unknown_methods_list_those_that_are_read() -> None:
    with pytest.raises(WeftError, match=r"^config.json: quantization by magic is not supported, only by .*fp8, gptq"):
        dequantize_reader(MemoryReader({}), {"quantization_config": {"quant_method": "magic"}}, "config.json")
    assert "awq" in METHODS


def test_errors_of_a_method_name_the_config() -> None:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 1]}}
    with pytest.raises(WeftError, match=r"^config.json: cannot read weights quantized by fp8: weight_block_size="):
        dequantize_reader(MemoryReader({}), config, "config.json")


def test_keys_that_may_change_weights_are_left_out() -> None:
    scheme = RecordingConfig({"bits": 4, "damp_percent": 0.1, "magic": 3, "nested": {"use_exllama": True}})
    scheme.get("bits")
    assert [part.name for part in find_unread_scheme(scheme) if "nested" not in part.name] == [
        "quantization_config.magic"
    ]

"""Types and attributes of ONNX in the notation of weft."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from weft.backends.viz.onnx_files.types import format_attribute, format_dtype, format_tensor, format_type, truncate
from weft.ir.errors import WeftError


def test_dtypes_have_the_names_of_weft_or_of_onnx() -> None:
    numbers = TensorProto.FLOAT, TensorProto.BFLOAT16, TensorProto.INT64, TensorProto.COMPLEX64, 999
    assert [format_dtype(n) for n in numbers] == ["f32", "bf16", "i64", "complex64", "dtype 999"]


def test_types_show_named_and_unknown_sizes() -> None:
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT16, ["batch", 576, None, "unk__3"])
    assert format_type(kind) == "f16[batch, 576, ?, ?]"
    assert format_type(helper.make_tensor_type_proto(TensorProto.FLOAT, [])) == "f32[]"
    assert format_type(helper.make_tensor_type_proto(TensorProto.FLOAT, None)) == "f32"
    assert format_type(helper.make_sequence_type_proto(kind)) == "sequence"
    assert format_type(onnx.TypeProto()) == ""


def test_attributes_are_text() -> None:
    branch = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [], [])
    values = {"axis": 1, "alpha": 0.1, "mode": "linear", "perm": [0, 2, 1], "then": branch, "both": [branch, branch]}
    assert {key: format_attribute(helper.make_attribute(key, value)) for key, value in values.items()} == {
        "axis": "1", "alpha": "0.1", "mode": "linear", "perm": "[0, 2, 1]", "then": "1 operation",
        "both": "1 operation, 1 operation",
    }  # fmt: skip
    large = numpy_helper.from_array(np.zeros((4, 5), np.float32))
    assert format_attribute(helper.make_attribute("value", large)) == "f32[4, 5]"


def test_tensors_are_listed_up_to_16_elements() -> None:
    assert format_tensor(numpy_helper.from_array(np.arange(3))) == "[0, 1, 2]"
    assert format_tensor(numpy_helper.from_array(np.zeros(17))) == ""
    assert format_tensor(numpy_helper.from_array(np.array(0.5))) == "0.5"
    external = TensorProto(dims=[1], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    assert format_tensor(external) == ""


def test_damaged_tensor_is_refused() -> None:
    tensor = TensorProto(name="w", dims=[2], data_type=TensorProto.FLOAT, raw_data=b"\0\0\0")
    with pytest.raises(WeftError, match=r"tensor 'w' \[2\] is damaged: "):
        format_tensor(tensor)


def test_long_text_is_cut_with_an_ellipsis() -> None:
    assert truncate("x" * 60) == "x" * 60 and truncate("x" * 61) == "x" * 59 + "…"

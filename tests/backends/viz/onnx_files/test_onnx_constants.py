"""Constants of ONNX files: weights, and sizes computed from shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from weft.backends.viz.onnx_files.onnx_constants import (
    Constant,
    OnnxOperation,
    compute_constant,
    copy_weight,
    format_attribute,
    format_dtype,
    format_tensor,
    format_type,
    read_constant,
    read_initializer,
    truncate,
)
from weft.ir.errors import WeftError

from ..onnx_models import DIM
from .operations import operation
from .reading import build_decoder, read_model


def test_sizes_computed_from_shapes_become_an_attribute(tmp_path: Path) -> None:
    """Shape, Gather, Unsqueeze, Concat: what they make is an attribute of the Reshape."""
    found = read_model(build_decoder("slashed", 1), tmp_path)
    assert not {"Shape", "Constant", "Concat", "Unsqueeze"} & {v.op for v in found.vertices}
    (reshape,) = [v for v in found.vertices if v.op == "Reshape"]
    assert reshape.attrs["shape"] == f"[batch, -1, {DIM}]"
    assert reshape.types == (f"f32[batch, ?, {DIM}]",) or reshape.types == (f"f32[batch, seq, {DIM}]",)


def sizes(*terms: str) -> Constant:
    return Constant("i64", (len(terms),), terms)


SIZES = {
    "three": Constant("i64", (), "3"),
    "zero": Constant("i64", (), "0"),
    "one": sizes("1"),
    "shape": sizes("batch", "seq", "8"),
    "heads": sizes("4", "2"),
    "last": sizes("-1"),
    "lowest": sizes("-3"),
    "weight": Constant("f32", (4, 6), None),
}
TYPES = {"x": "f32[batch, ?, 8]", "scalar": "f32[]"}


@pytest.mark.parametrize(
    ("op", "terms"),
    [
        (operation("Shape", "x", "y"), ("batch", "size 1", "8")),
        (operation("Shape", "x", "y", start=1, end=2), ("size 1",)),
        (operation("Shape", "weight", "y"), ("4", "6")),
        (operation("Shape", "unknown", "y"), "shape"),
        (operation("Size", "x", "y"), "batch * ? * 8"),
        (operation("Size", "scalar", "y"), "1"),
        (operation("Gather", "shape three", "y"), "Gather([batch, seq, 8], 3)"),  # out of range
        (operation("Gather", "shape zero", "y"), "batch"),
        (operation("Gather", "shape last", "y"), ("8",)),
        (operation("Gather", "shape lowest", "y"), ("batch",)),
        (operation("Slice", "shape zero last", "y"), ("batch", "seq")),
        (operation("Unsqueeze", "three", "y"), ("3",)),
        (operation("Squeeze", "last", "y"), "-1"),
        (operation("Concat", "shape heads", "y"), ("batch", "seq", "8", "4", "2")),
        (operation("Mul", "three three", "y"), "9"),
        (operation("Div", "three zero", "y"), "(3 // 0)"),
        (operation("Sub", "shape one", "y"), ("(batch - 1)", "(seq - 1)", "7")),
        (operation("Cast", "shape", "y"), ("batch", "seq", "8")),
        (operation("Sqrt", "three", "y"), "Sqrt(3)"),
    ],
    ids=str,
)
def test_sizes_are_computed_from_shapes(op: OnnxOperation, terms: str | tuple[str, ...]) -> None:
    constant = compute_constant(op, SIZES, TYPES)
    assert constant is not None and constant.terms == terms


@pytest.mark.parametrize(
    "op", [operation("Add", "three x", "y"), operation("Relu", "three", "y"), operation("Neg", "weight", "y")], ids=str
)
def test_results_that_depend_on_data_are_no_constants(op: OnnxOperation) -> None:
    assert compute_constant(op, SIZES, TYPES) is None


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (operation("Transpose", "weight", "y"), (6, 4)),
        (operation("Transpose", "weight", "y", perm=[0, 1]), (4, 6)),
        (operation("Cast", "weight", "y"), (4, 6)),
        (operation("Reshape", "weight heads", "y"), (4, 2)),
        (operation("Reshape", "weight last", "y"), (24,)),
        (operation("Reshape", "weight shape", "y"), None),  # of a size that is known at run time only
        (operation("Relu", "weight", "y"), None),
        (operation("Cast", "x", "y"), None),
    ],
    ids=str,
)
def test_moved_weights_remain_weights(op: OnnxOperation, shape: tuple[int, ...] | None) -> None:
    copy = copy_weight(op, SIZES)
    assert (copy and (copy.shape, copy.terms, copy.source)) == (shape and (shape, None, "weight"))


def test_initializers_are_weights_or_text() -> None:
    """Single elements and short vectors of integers are part of shapes; the rest are weights."""

    def read(values: object, kind: type) -> Constant:
        return read_initializer(numpy_helper.from_array(np.asarray(values, kind)))

    assert read([2, -1], np.int64).terms == ("2", "-1") and read([2, -1], np.int64).text == "[2, -1]"
    assert read(0.5, np.float32).terms == "0.5"
    weight = read([[1, 2, 3]], np.float16)
    assert (weight.terms, weight.text, weight.shape, weight.elements, weight.bytes) == (None, "", (1, 3), 3, 6)
    assert read([1.0, 2.0], np.float32).terms is None
    assert weight.numeric and read([[1, 2]], np.uint8).numeric and not read([[1, 2]], np.int64).numeric


def test_constant_node_has_one_value() -> None:
    one = {"value_ints": helper.make_attribute("value_ints", [1, 2])}
    assert read_constant(one) == Constant("i64", (2,), ("1", "2"))
    for attrs, listed in (
        ({}, "none"),
        ({**one, "value_int": helper.make_attribute("value_int", 1)}, "'value_ints', "),
    ):
        with pytest.raises(WeftError, match=f"a Constant must have one value attribute, not {listed}"):
            read_constant(attrs)


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

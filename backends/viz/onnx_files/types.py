"""Types and attributes of ONNX as text, in the notation of weft."""

from __future__ import annotations

import re

import onnx
from onnx import numpy_helper

from weft.ir.documents import shown
from weft.ir.errors import WeftError

NAMES = {
    "FLOAT": "f32", "DOUBLE": "f64", "FLOAT16": "f16", "BFLOAT16": "bf16", "FLOAT8E4M3FN": "f8e4m3",
    "FLOAT8E5M2": "f8e5m2", "INT64": "i64", "INT32": "i32", "INT16": "i16", "INT8": "i8", "INT4": "i4",
    "UINT64": "u64", "UINT32": "u32", "UINT16": "u16", "UINT8": "u8", "UINT4": "u4", "BOOL": "bool",
}  # fmt: skip
BITS = {"f32": 32, "f64": 64, "f16": 16, "bf16": 16, "f8e4m3": 8, "f8e5m2": 8, "i64": 64, "i32": 32, "i16": 16}
BITS |= {"i8": 8, "i4": 4, "u64": 64, "u32": 32, "u16": 16, "u8": 8, "u4": 4, "bool": 8}
MOST = 16  # elements of a tensor that are told one by one
LONGEST = 60  # characters
INVENTED = re.compile(r"unk__\d+")


def dtype_name(number: int) -> str:
    """The name of an ONNX dtype."""
    try:
        name = str(onnx.TensorProto.DataType.Name(number))
    except ValueError:  # of a newer ONNX than the one here
        return f"dtype {number}"
    return NAMES.get(name, name.lower())


def type_text(kind: onnx.TypeProto) -> str:
    """A type as "f32[batch, seq, 576]"; "" where the file does not tell it."""
    if not kind.HasField("tensor_type"):
        return (kind.WhichOneof("value") or "").removesuffix("_type")
    tensor = kind.tensor_type
    if not tensor.HasField("shape"):
        return dtype_name(tensor.elem_type)
    return f"{dtype_name(tensor.elem_type)}[{', '.join(map(_size, tensor.shape.dim))}]"


def _size(dim: onnx.TensorShapeProto.Dimension) -> str:
    """A size; "?" if nobody knows it, whatever number ONNX gives to what nobody knows."""
    name = "" if INVENTED.fullmatch(dim.dim_param) else dim.dim_param
    return str(dim.dim_value) if dim.HasField("dim_value") else name or "?"


def described(attribute: onnx.AttributeProto) -> str:
    """An attribute as text; of a graph, how much is in it."""
    kind = onnx.AttributeProto
    if attribute.type in (kind.GRAPH, kind.GRAPHS):
        counts = [len(g.node) for g in (attribute.graphs or [attribute.g])]
        return ", ".join(f"{n} operation{'s' * (n != 1)}" for n in counts)
    if attribute.type == kind.TENSOR:
        return tensor_text(attribute.t) or f"{dtype_name(attribute.t.data_type)}{list(attribute.t.dims)}"
    value = onnx.helper.get_attribute_value(attribute)
    return short(_plain(value))


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_plain, value))}]"
    return str(value)


def tensor_text(tensor: onnx.TensorProto) -> str:
    """The elements of a small tensor whose data is in the file; "" of others."""
    count = 1
    for d in tensor.dims:
        count *= d
    if tensor.data_location == onnx.TensorProto.EXTERNAL or count > MOST:
        return ""
    try:
        array = numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError, AttributeError) as e:  # onnx checks neither type nor length
        raise WeftError(f"the tensor {shown(tensor.name)} of {list(tensor.dims)[:8]} is damaged: {e}") from e
    return short(_plain(array.tolist()))


def short(text: str) -> str:
    """`text`, of which only the beginning where it is long."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"

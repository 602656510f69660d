"""Operations of an ONNX file, and its types and attributes as text, in the notation of weft."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from weft.ir.errors import WeftError
from weft.ir.storage.documents import quote_value
from weft.ir.types import dtypes

MOST = 16  # maximum number of elements that are listed
LONGEST = 60  # characters
INVENTED = re.compile(r"unk__\d+")


@dataclass
class OnnxOperation:
    """An operation of the file.

    `names`: the function calls that contain it, then its own name. `scopes`: the modules that contain it, if the
    exporter records them. `inputs`: value names, "" for an omitted operand. `captured`: outer values that subgraphs in
    its attributes read.
    """

    kind: str
    domain: str
    names: tuple[str, ...]
    scopes: tuple[str, ...] | None
    inputs: list[str]
    outputs: list[str]
    attrs: dict[str, onnx.AttributeProto]
    captured: tuple[str, ...] = ()


@functools.cache
def format_dtype(number: int) -> str:
    """Return weft's name of ONNX dtype `number`, else ONNX's own in lower case, else "dtype " + `number`."""
    try:
        name = str(onnx.TensorProto.DataType.Name(number)).lower()
    except ValueError:  # of a newer ONNX than the one here
        return f"dtype {number}"
    try:
        return dtypes.from_numpy(np.empty(0, onnx.helper.tensor_dtype_to_np_dtype(number))).name
    except (KeyError, WeftError):
        return name


def format_type(kind: onnx.TypeProto) -> str:
    """Return a tensor type as "f32[batch, seq, 576]" (without a shape only the dtype), any other type by its name."""
    if not kind.HasField("tensor_type"):
        return (kind.WhichOneof("value") or "").removesuffix("_type")
    tensor = kind.tensor_type
    if not tensor.HasField("shape"):
        return format_dtype(tensor.elem_type)
    return f"{format_dtype(tensor.elem_type)}[{', '.join(map(_format_size, tensor.shape.dim))}]"


def _format_size(dim: onnx.TensorShapeProto.Dimension) -> str:
    """Return a size as a string; "?" if it is unknown or a placeholder name of shape inference."""
    name = "" if INVENTED.fullmatch(dim.dim_param) else dim.dim_param
    return str(dim.dim_value) if dim.HasField("dim_value") else name or "?"


def format_attribute(attribute: onnx.AttributeProto) -> str:
    """Return an attribute as up to 60 characters; for a graph its number of operations, for a large tensor its type."""
    kind = onnx.AttributeProto
    if attribute.type in (kind.GRAPH, kind.GRAPHS):
        counts = [len(g.node) for g in (attribute.graphs or [attribute.g])]
        return ", ".join(f"{n} operation{'s' * (n != 1)}" for n in counts)
    if attribute.type == kind.TENSOR:
        return format_tensor(attribute.t) or f"{format_dtype(attribute.t.data_type)}{list(attribute.t.dims)}"
    return truncate(_format_value(onnx.helper.get_attribute_value(attribute)))


def _format_value(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    return str(value)


def format_tensor(tensor: onnx.TensorProto) -> str:
    """Return `tensor` as up to 60 characters, "" if external or larger than MOST. Raises WeftError if it is damaged."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL or math.prod(tensor.dims) > MOST:
        return ""
    try:
        array = numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError, AttributeError) as e:  # onnx checks neither type nor length
        raise WeftError(f"tensor {quote_value(tensor.name)} {list(tensor.dims)[:8]} is damaged: {e}") from e
    return truncate(_format_value(array.tolist()))


def truncate(text: str) -> str:
    """Return `text`, cut to 60 characters with a final ellipsis if it is longer."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"

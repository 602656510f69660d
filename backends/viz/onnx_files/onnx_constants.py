"""Constants of an ONNX file: weights, small values shown as text, and sizes computed from shapes.

Exporters write the target shape of a Reshape as a dozen operations on the shape of some value. Here they are replaced
by their result: "[batch, seq, 8, 64]".
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

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


Terms = str | tuple[str, ...]  # a size, or a tuple of sizes; a single text "f(x)" if the sizes are unknown

WHOLE = re.compile(r"-?\d+")
SIGNS: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "Add": ("+", operator.add), "Sub": ("-", operator.sub), "Mul": ("*", operator.mul),
    "Div": ("//", operator.floordiv), "Mod": ("%", operator.mod),
}  # fmt: skip
SAME = ("Cast", "Identity")
_VALUES = ("value", "sparse_value", *(f"value_{kind}{s}" for kind in ("int", "float", "string") for s in ("", "s")))
SIZING = {
    "Shape", "Size", "Gather", "Squeeze", "Unsqueeze", "Concat", "Slice", "Reshape", "Equal", "Where", "Floor", "Ceil",
    "Min", "Max", "Neg", "Sqrt", "ConstantOfShape", "ReduceProd", "Not", "And", "Or", "Greater", "Less",
    *SIGNS, *SAME,
}  # fmt: skip


@dataclass(frozen=True)
class Constant:
    """A value that depends on no input except through shapes.

    `terms`: a small value or sizes as text; None for a weight.
    `source`: the name of the tensor in the file that a weight is computed from; "" if it is that tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    terms: Terms | None
    source: str = ""

    @property
    def text(self) -> str:
        if self.terms is None:
            return ""
        return truncate(self.terms if isinstance(self.terms, str) else f"[{', '.join(self.terms)}]")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        bits = dtypes.ALL[self.dtype].bits if self.dtype in dtypes.ALL else 8
        return -(-self.elements * bits // 8)

    @property
    def numeric(self) -> bool:
        """Return whether the constant may be learned: its dtype is that of values or codes, not of indices."""
        return (self.dtype[:1] in "fb" and self.dtype != "bool") or self.dtype in ("i8", "u8", "i4", "u4")


def read_initializer(tensor: onnx.TensorProto) -> Constant:
    """Return an initializer as a constant, with `terms` if it is one element, strings or a short integer vector."""
    dtype, shape = format_dtype(tensor.data_type), tuple(tensor.dims)
    plain = not shape or math.prod(shape) == 1 or (dtype[:1] in "iu" and len(shape) == 1) or dtype == "string"
    text = format_tensor(tensor) if plain else ""
    if not text:
        return Constant(dtype, shape, None)
    return Constant(dtype, shape, tuple(text[1:-1].split(", ")) if len(shape) == 1 and not text.endswith("…") else text)


def read_constant(attrs: Mapping[str, onnx.AttributeProto]) -> Constant:
    """Return the constant of a Constant node. Raise WeftError unless `attrs` has one attribute, which is a value."""
    name, attr = next(iter(attrs.items()), ("", None))
    if attr is None or len(attrs) > 1 or name not in _VALUES:
        raise WeftError(f"a Constant must have one value attribute, not {', '.join(map(quote_value, attrs)) or 'none'}")
    if name == "value":
        return read_initializer(attr.t)
    if name == "sparse_value":
        return Constant(format_dtype(attr.sparse_tensor.values.data_type), tuple(attr.sparse_tensor.dims), None)
    value = onnx.helper.get_attribute_value(attr)
    dtype = {"i": "i64", "f": "f32", "s": "string"}[name.removeprefix("value_")[0]]
    if isinstance(value, list):
        return Constant(dtype, (len(value),), tuple(map(str, value)) if len(value) <= 16 else None)
    return Constant(dtype, (), value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value))


def compute_constant(op: OnnxOperation, constants: Mapping[str, Constant], types: Mapping[str, str]) -> Constant | None:
    """Return the sizes that `op`, if in SIZING, computes from `constants` and the shapes in `types`; else None."""
    if op.kind not in SIZING or any(a.type == onnx.AttributeProto.GRAPH for a in op.attrs.values()):
        return None
    if op.kind in ("Shape", "Size") and op.inputs:
        return Constant("i64", (), _read_shape(op, constants, types))
    operands = [constants.get(x) for x in op.inputs if x]
    terms = [c.terms for c in operands if c is not None and c.terms is not None]
    return Constant("i64", (), _compute_sizes(op.kind, terms)) if terms and len(terms) == len(operands) else None


def copy_weight(op: OnnxOperation, constants: Mapping[str, Constant]) -> Constant | None:
    """Return the weight that `op` reshapes, transposes, casts or dequantizes, with new shape but old dtype, or None."""
    weight = constants.get(op.inputs[0]) if op.inputs and op.inputs[0] else None
    if weight is None or weight.terms is not None or any(x and x not in constants for x in op.inputs):
        return None
    shape = weight.shape
    if op.kind == "Transpose":
        order = list(op.attrs["perm"].ints) if "perm" in op.attrs else range(len(shape))[::-1]
        shape = tuple(shape[i] for i in order if i < len(shape))
    elif op.kind == "Reshape" and len(op.inputs) > 1:
        wanted = constants[op.inputs[1]].terms
        if not isinstance(wanted, tuple) or not all(WHOLE.fullmatch(n) for n in wanted) or "0" in wanted:
            return None
        factor = math.prod(int(n) for n in wanted if n != "-1")
        shape = tuple(weight.elements // factor if n == "-1" else int(n) for n in wanted)
    elif op.kind not in (*SAME, "DequantizeLinear"):
        return None
    return replace(weight, shape=shape, source=weight.source or op.inputs[0])


def _read_shape(op: OnnxOperation, constants: Mapping[str, Constant], types: Mapping[str, str]) -> Terms:
    name = op.inputs[0]
    if name in constants and constants[name].terms is None:
        dims = tuple(map(str, constants[name].shape))
    elif "[" in types.get(name, ""):
        inner = types[name].partition("[")[2].rstrip("]")
        dims = tuple(inner.split(", ")) if inner else ()
    else:
        return op.kind.lower()
    if op.kind == "Size":
        return " * ".join(dims) or "1"
    dims = tuple(f"size {i}" if d == "?" else d for i, d in enumerate(dims))
    start, end = (op.attrs[k].i if k in op.attrs else None for k in ("start", "end"))
    return dims[slice(start, end)]


def _compute_sizes(kind: str, terms: list[Terms]) -> Terms:
    """Return the sizes that the operator `kind` computes from the sizes of its operands."""
    first, *rest = terms
    if kind in SAME:
        return first
    if kind == "Unsqueeze":
        return first if isinstance(first, tuple) else (first,)
    if kind in ("Squeeze", "Reshape"):
        return first[0] if isinstance(first, tuple) and len(first) == 1 and kind == "Squeeze" else first
    if kind == "Concat" and all(isinstance(t, tuple) for t in terms):
        return tuple(x for t in terms for x in t)
    if kind in ("Gather", "Slice") and isinstance(first, tuple):
        selected = _select_sizes(kind, first, rest)
        if selected is not None:
            return selected
    if kind in SIGNS and len(terms) == 2:
        return _combine_sizes(kind, terms[0], terms[1])
    return truncate(f"{kind}({', '.join(t if isinstance(t, str) else '[' + ', '.join(t) + ']' for t in terms)})")


def _select_sizes(kind: str, first: tuple[str, ...], others: list[Terms]) -> Terms | None:
    """Return the sizes that a Gather or Slice selects; None if its indices are unknown, out of range or reversed."""
    numbers = [[t] if isinstance(t, str) else [*t] for t in others]
    if not numbers or not all(WHOLE.fullmatch(x) for vector in numbers for x in vector):
        return None
    indices = [[int(x) for x in vector] for vector in numbers]
    if kind == "Gather":
        if any(not -len(first) <= i < len(first) for i in indices[0]):
            return None
        picked = tuple(first[i] for i in indices[0])
        return picked if isinstance(others[0], tuple) else picked[0]
    if len(indices) < 2 or any(len(vector) != 1 for vector in indices):
        return None
    step = indices[3][0] if len(indices) > 3 else 1
    return first[indices[0][0] : indices[1][0] : step] if step > 0 else None


def _combine_sizes(kind: str, a: Terms, b: Terms) -> Terms:
    """Return sizes combined elementwise by the operator `kind`: a number if both are numbers, else a formula."""
    if isinstance(a, str) and isinstance(b, str):
        if WHOLE.fullmatch(a) and WHOLE.fullmatch(b) and (int(b) or kind not in ("Div", "Mod")):
            return str(SIGNS[kind][1](int(a), int(b)))
        return truncate(f"({a} {SIGNS[kind][0]} {b})")
    left = (a,) if isinstance(a, str) else a
    right = (b,) if isinstance(b, str) else b
    if len(left) != len(right) and (1 not in (len(left), len(right)) or not (left and right)):
        return truncate(f"{kind}({a}, {b})")
    count = max(len(left), len(right))
    left, right = left * (count // len(left) or 1), right * (count // len(right) or 1)
    return tuple(str(_combine_sizes(kind, x, y)) for x, y in zip(left, right, strict=False))

"""Elementwise ops, reductions and activations: mostly one torch function each."""

from __future__ import annotations

import math
from typing import Any

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.passes.analysis.feed_forward import find_activation_name

from ..program.emitter import Emitter
from ..program.registry import lowering
from ..program.statements import TORCH_NAMES, Var

_SIGNS = {
    **{"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "pow": "**"},
    **{"equal": "==", "less": "<", "less_equal": "<=", "logical_and": "&", "logical_or": "|"},
}
TEXTS = {
    **{name: f"{{0}}.{name}()" for name in ("abs", "ceil", "cos", "erf", "exp", "floor", "log", "reciprocal", "round")},
    **{name: f"{{0}}.{name}()" for name in ("rsqrt", "sigmoid", "sin", "sqrt", "square", "tanh")},
    **{name: f"{{0}} {sign} {{1}}" for name, sign in _SIGNS.items()},
    **{name: f"torch.{name}({{0}}, {{1}})" for name in ("maximum", "minimum")},
    **{"neg": "-{0}", "logical_not": "~{0}", "where": "torch.where({0}, {1}, {2})"},
    **{"relu": "F.relu({0})", "relu2": "F.relu({0}).square()", "softplus": "F.softplus({0})"},
    "fourier": "torch.fft.fft2({0}.float()).real.to({0}.dtype)",  # fft has no f16 and bf16 on all devices
}
MAX_LITERAL = 8  # most characters of a number that is written in full
ACTIVATIONS = {  # of glu and moe, see `write_activation`
    "elu": "F.elu({0})",
    "identity": "{0}",
    **{name: TEXTS[name] for name in ("sigmoid", "relu", "relu2", "tanh")},
    "gelu": "F.gelu({0})",
    "gelu_tanh": 'F.gelu({0}, approximate="tanh")',
    "gelu_quick": "{0} * (1.702 * {0}).sigmoid()",
    "silu": "F.silu({0})",
}


@lowering(*(getattr(ops, name) for name in TEXTS))
def _elementwise(e: Emitter, node: Node) -> Var:
    values = [v for v in node.inputs if v is not None]
    text, values = _inline_fills(TEXTS[node.op.name], values, node)
    text = cast_to_model_dtype(text, values)
    shape = node.output.shape if len(values) > 1 else None  # the result of a unary function gets a name of its own
    replaces = next((i for i, v in enumerate(values) if v.producer is not None and v.shape == shape), None)
    return e.emit(text, *values, replaces=replaces)


def _inline_fills(text: str, values: list[Value], node: Node) -> tuple[str, list[Value]]:
    """Return `text` with literals for those of `values` that are constant fills, and the remaining values. Both are
    returned unchanged where torch requires a tensor, or where a fill determines the shape of the result."""
    # torch.maximum and torch.minimum take tensors only, not Python numbers.
    if len(values) < 2 or node.op in (ops.maximum, ops.minimum, ops.logical_and, ops.logical_or):
        return text, values
    numbers = {i: f"({n})" for i, v in enumerate(values) if (n := _find_fill(v)) is not None}  # a power binds tighter
    operands = [v for i, v in enumerate(values) if i not in numbers]
    if not numbers or all(v.shape != node.output.shape for v in operands):
        return text, values
    if node.op is ops.where and (0 in numbers or len(operands) < 2):
        return text, values
    places = iter(range(len(operands)))
    return text.format(*(numbers[i] if i in numbers else f"{{{next(places)}}}" for i in range(len(values)))), operands


def cast_to_model_dtype(text: str, values: list[Value]) -> str:
    """Return `text` with its second operand cast to the dtype of the first, if only the second is from a constant
    table. Such tables stay f32 when the model is cast. Nothing is cast if the first operand is not a float tensor."""
    tables = [_is_table_lookup(v) for v in values]
    cast = tables == [False, True] and values[0].type.dtype.is_float
    return text.replace("{1}", "{1}.to({0}.dtype)") if cast else text


def _is_table_lookup(value: Value) -> bool:
    """Return whether `value` is an embedding in a constant table, which keeps its dtype when the model is cast."""
    producer = value.producer
    table = producer.operand("table") if producer is not None and producer.op is ops.embedding else None
    return isinstance(table, Param) and table.recipe.is_constant


def _find_fill(value: Value) -> str | None:
    """Return the literal of the number that fills `value`, if it is a constant fill (`affine` with by=0); else None."""
    producer = value.producer
    if producer is None or producer.op is not ops.affine or producer.attrs["by"] != 0:
        return None
    return format_number(producer.attrs["plus"], value)


@lowering(ops.swish)
def _swish(e: Emitter, node: Node) -> Var:
    beta = node.attrs["beta"]
    text = "F.silu({0})" if beta == 1 else f"{{0}} * ({format_number(beta)} * {{0}}).sigmoid()"
    return e.emit(text, node.required_operand("x"), replaces=0)


@lowering(ops.gelu)
def _gelu(e: Emitter, node: Node) -> Var:
    return e.emit(write_activation(find_activation_name(node) or ""), node.required_operand("x"), replaces=0)


@lowering(ops.elu)
def _elu(e: Emitter, node: Node) -> Var:
    return e.emit(f"F.elu({{0}}, {format_number(node.attrs['alpha'])})", node.required_operand("x"), replaces=0)


@lowering(ops.dropout)
def _dropout(e: Emitter, node: Node) -> Var:
    return e.emit(f"F.dropout({{0}}, {node.attrs['share']}, self.training)", node.required_operand("x"), replaces=0)


@lowering(ops.affine)
def _affine(e: Emitter, node: Node) -> Var:
    x, by, plus = node.required_operand("x"), node.attrs["by"], node.attrs["plus"]
    if by == 0:
        return e.emit(f"torch.full_like({{0}}, {format_number(plus, node.output)})", x)
    text = "{0}" if by == 1 else "-{0}" if by == -1 else f"{{0}} {_write_factor(e.attr(node, 'by'), node.output)}"
    offset = format_number(abs(plus), node.output)
    text += f" - {offset}" if plus < 0 else f" + {offset}" if plus != 0 else ""
    return e.emit(text, x, replaces=0)


def _write_factor(by: Any, like: Value) -> str:
    """Return the source that multiplies by `by`: ``/ n`` if `by` is 1/n with long decimals, else ``* by``."""
    long = like.type.dtype.is_float and type(by) is float and len(repr(by)) > MAX_LITERAL
    if long and 1e-6 < abs(by) < 1 and 1 / round(1 / by) == by:
        return f"/ {format_number(float(round(1 / by)))}"
    return f"* {format_number(by, like)}"


@lowering(ops.clip)
def _clip(e: Emitter, node: Node) -> Var:
    bounds = [f"{n}={format_number(b, node.output)}" for n in ("low", "high") if (b := node.attrs[n]) is not None]
    text = ", ".join(bounds).replace("low", "min").replace("high", "max")
    return e.emit(f"{{0}}.clamp({text})", node.required_operand("x"), replaces=0)


@lowering(ops.cast)
def _cast(e: Emitter, node: Node) -> Var:
    x, to = node.required_operand("x"), node.attrs["to"]
    if to.is_float and x.type.dtype.is_float:  # the model computes in the dtype of its weights
        return e.emit("{0}", x, replaces=0)
    return e.emit(f"{{0}}.to(torch.{TORCH_NAMES[to.name]})", x)


@lowering(ops.sum, ops.mean, ops.max, ops.min, ops.prod)
def _reduce(e: Emitter, node: Node) -> Var:
    x, axes, rest = node.required_operand("x"), node.attrs["axes"], ", keepdim=True" if node.attrs["keepdims"] else ""
    name = {"max": "amax", "min": "amin"}.get(node.op.name, node.op.name)
    if name == "prod":  # torch reduces one axis at a time
        text = "{0}" + "".join(f".prod({a}{rest})" for a in sorted((a % len(x.shape) for a in axes), reverse=True))
    else:
        text = f"{{0}}.{name}({', '.join(map(str, axes)) if len(axes) == 1 else tuple(axes)}{rest})"
    return e.emit(text, x)


@lowering(ops.cumsum)
def _cumsum(e: Emitter, node: Node) -> Var:
    text = f"{{0}}.cumsum({node.attrs['axis']})"
    return e.emit(f"{text} - {{0}}" if node.attrs["exclusive"] else text, node.required_operand("x"))


@lowering(ops.softmax)
def _softmax(e: Emitter, node: Node) -> Var:
    x, axis = node.required_operand("x"), node.attrs["axis"]
    return e.emit(f"{{0}}.softmax({axis})" if _is_finite(x) else f"softmax_or_zeros({{0}}, {axis})", x, replaces=0)


def _is_finite(x: Value) -> bool:
    """Return whether `x` cannot contain the −∞ of a mask: it is a matrix product or a norm, perhaps scaled."""
    if x.producer is not None and x.producer.op in (ops.affine, ops.div):
        return _is_finite(x.producer.required_operand("x"))
    return x.producer is not None and x.producer.op in (ops.linear, ops.matmul, ops.rms_norm, ops.layer_norm)


def write_activation(name: str) -> str:
    """Return the expression that applies the activation called `name` to the placeholder ``{0}``."""
    if name.startswith("swish("):
        return f"{{0}} * ({name[6:-1]} * {{0}}).sigmoid()"
    return ACTIVATIONS[name]


def format_number(x: float, like: Value | None = None) -> str:
    """Return `x` as a Python literal: an int if `like` is an integer tensor; ``n**0.5`` or ``n**-0.5`` instead of long
    decimals where that is exact. A named size is written as its name."""
    if like is not None and not like.type.dtype.is_float:
        return repr(int(x))
    text = {"inf": "math.inf", "-inf": "-math.inf", "nan": "math.nan"}.get(repr(x), repr(x))
    if type(x) not in (int, float):  # a named size
        return text
    if len(text) <= MAX_LITERAL or not 1e-4 < x < 1e4:
        return text
    roots = ((round(x ** (1 / p)), p) for p in (0.5, -0.5))
    return next((f"{n}**{p}" for n, p in roots if n > 1 and math.isqrt(n) ** 2 != n and n**p == x), text)

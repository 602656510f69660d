"""Linear layers of a decode step, fused with the norm before them, gates, activations and residual adds."""

from __future__ import annotations

import torch

from weft.ir import ops
from weft.ir.graph import Node, Param, Value

from ...kernels.shared import gemv
from ...kernels.shared.activation import ACTIVATIONS
from ...ops.calls import FunctionCall
from ...program.emitter import local_name
from ...program.statements import Operand, Var
from ..step_emitter import StepEmitter
from ..step_registry import lowers


def few_rows(dtype: torch.dtype) -> str | None:
    """Return None, or the reason (str) why no GEMV kernel multiplies one token by weights of `dtype`."""
    return gemv.refusal(torch.empty(1, 1, dtype=dtype, device="meta"))


def kernel_activation(name: str | None) -> str | None:
    """Return the name that kernels use for the activation `name`, such as silu for swish(1.0); None if they lack it."""
    name = {"swish(1.702)": "gelu_quick", "swish(1.0)": "silu"}.get(name or "", name)
    return name if name in ACTIVATIONS else None


def unknown(e: StepEmitter, node: Node) -> str | None:
    """Return None, or a reason (str) if kernels lack the activation of `node`."""
    name = node.attrs["activation"]
    return None if kernel_activation(name) else f"the activation is {name}"


def opening(call: FunctionCall, node: Node) -> FunctionCall:
    """Add activation, limit and shift of the gated unit `node` to `call` unless they are the defaults; return it."""
    a = node.attrs
    call.set("activation", kernel_activation(a["activation"]), default="silu")
    return call.set("limit", a["limit"]).set("shift", a["shift"], default=0)


def weights(e: StepEmitter, node: Node) -> tuple[Operand | None, Operand | None, Operand | None]:
    """Return the weight, bias and norm of `node`, and enter the innermost scope that contains them."""
    operands = e.weight(node.operand("weight")), e.weight(node.operand("bias")), e.norm_of(node)
    e.enter_scope_of(*operands)
    return operands


@lowers(ops.pack)
def pack(e: StepEmitter, node: Node) -> Operand | None:
    """Return the weights of an `ops.pack` concatenated as one operand; None if they cannot be packed."""
    return e.pack_params([w for w in node.inputs if isinstance(w, Param)])


@lowers(ops.norm_linear, when=unknown)
def linear(e: StepEmitter, node: Node) -> Var | tuple[Var, ...]:
    """Emit a linear map with the norm before and the activation after it. If its weights are packed and an `ops.split`
    is the only reader, return placeholders, because `split` emits the call."""
    if _find_split(node.output) is not None:
        return e.placeholders(node)
    weight, bias, norm = weights(e, node)
    e.record_kernel("norm_linear", few_rows)
    call = FunctionCall("norm_linear").give(node.required_operand("x"), weight).named(bias=bias, norm=norm)
    return call.set("activation", kernel_activation(node.attrs["activation"]), default="identity").emit(e)


def _find_split(product: Value) -> Node | None:
    """Return the `ops.split` node that is the only reader of `product`, a product by packed weights; else None."""
    linear, reader = product.producer, product.uses[0][0] if len(product.uses) == 1 else None
    packed = linear is not None and linear.op is ops.norm_linear and not isinstance(linear.operand("weight"), Param)
    return reader if packed and reader is not None and reader.op is ops.split else None


@lowers(ops.split)
def split(e: StepEmitter, node: Node) -> tuple[Var, ...] | None:
    """Emit linear maps with packed weights as one product that is then split; return None for other splits."""
    product = node.required_operand("x").producer
    if product is None or _find_split(product.output) is not node:
        return None
    e.enter(product)
    weight, bias, norm = weights(e, product)
    e.record_kernel("norm_linear", few_rows)
    call = FunctionCall("norm_linear").give(product.required_operand("x"), weight).named(bias=bias, norm=norm)
    widths = ", ".join(map(str, node.attrs["sizes"]))
    return e.many(f"{call}.split(({widths}), -1)", *call.operands, names=tuple(local_name(v) for v in node.outputs))


@lowers(ops.head_linear)
def head_linear(e: StepEmitter, node: Node) -> Var | None:
    """Emit a linear map with a weight per head, [heads·out, in]; return None for the transposed one (`inverse`)."""
    x, weight = node.operand("x"), node.operand("weight")
    if node.attrs["inverse"] or x is None or not isinstance(weight, Param):
        return None
    matrix = e.weight(weight)
    e.enter_scope_of(matrix)
    e.record_kernel("linear_by_head", few_rows)
    return FunctionCall("linear_by_head").give(x, matrix, str(node.attrs["heads"])).emit(e)


@lowers(ops.norm_glu, when=unknown)
def glu(e: StepEmitter, node: Node) -> Var:
    """Emit a gated unit with both of its projections, and the norm before them."""
    weight, bias, norm = weights(e, node)
    e.record_kernel("norm_glu", few_rows)
    call = FunctionCall("norm_glu").give(node.required_operand("x"), weight).named(bias=bias, norm=norm)
    return opening(call, node).emit(e, name="h")


@lowers(ops.linear_residual)
def linear_residual(e: StepEmitter, node: Node) -> Var:
    """Emit a projection that is added to the residual stream."""
    weight, bias, norm = weights(e, node)
    stream: Value = node.required_operand("residual")
    call = FunctionCall("linear_residual").give(node.required_operand("x"), weight, stream).named(bias=bias, norm=norm)
    call.set("scale", node.attrs["scale"], default=1).named(tickets=e.tickets(node.output.width))
    e.record_kernel("linear_residual", few_rows)
    return call.emit(e, name="x", replaces=stream)


@lowers(ops.rms_norm, ops.layer_norm)
def norm(e: StepEmitter, node: Node) -> Var | None:
    """Emit a norm that no kernel has fused; return None if its weights are computed, not parameters."""
    gains = [node.operand(o.name) for o in node.op.operands[1:]]
    if any(g is not None and not isinstance(g, Param) for g in gains):
        return None
    module = e.norm("rms" if node.op is ops.rms_norm else "layer", node.attrs["eps"], *gains)
    e.enter_scope_of(module)
    return e.emit("{1}({0})", node.required_operand("x"), module)

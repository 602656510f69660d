"""Linear layers of a decode step, fused with the norm before them, gates, activations and residual adds."""

from __future__ import annotations

import torch

from weft.ir import ops
from weft.ir.graph import Node, Param, Value

from ...kernels.shared import gemv
from ...kernels.shared.activation import ACTIVATIONS
from ...ops.calls import FunctionCall
from ...program.emitter import choose_name
from ...program.statements import Operand, Var
from ..step_emitter import StepEmitter, step_lowering


def refuse_gemv(dtype: torch.dtype) -> str | None:
    """Return None, or the reason (str) why no GEMV kernel multiplies a token by weights of `dtype`."""
    return gemv.refusal(torch.empty(1, 1, dtype=dtype, device="meta"))


def find_kernel_activation(name: str | None) -> str | None:
    """Return the name that kernels use for the activation `name`, such as silu for swish(1.0); None if they lack it."""
    name = {"swish(1.702)": "gelu_quick", "swish(1.0)": "silu"}.get(name or "", name)
    return name if name in ACTIVATIONS else None


def refuse_activation(e: StepEmitter, node: Node) -> str | None:
    """Return None, or a reason (str) if kernels lack the activation of `node`."""
    name = node.attrs["activation"]
    return None if find_kernel_activation(name) else f"the activation is {name}"


def add_activation(call: FunctionCall, node: Node) -> FunctionCall:
    """Add the activation, limit and shift of the gated unit `node` to `call`, except defaults; return `call`."""
    a = node.attrs
    call.set("activation", find_kernel_activation(a["activation"]), default="silu")
    return call.set("limit", a["limit"]).set("shift", a["shift"], default=0)


def make_product_call(e: StepEmitter, node: Node, kernel: str, *operands: Value) -> FunctionCall:
    """Return the call kernel(x, weight, *operands, bias=…, norm=…) with x, weight, bias and norm of the projection
    `node`. Record the kernel, and enter the innermost scope that contains the weights."""
    weight, bias, norm = e.get_weight(node.operand("weight")), e.get_weight(node.operand("bias")), e.find_norm(node)
    e.scope = e.find_scope(weight, bias, norm)
    e.record_kernel(kernel, refuse_gemv, node=node)
    return FunctionCall(kernel).add(node.required_operand("x"), weight, *operands).add_named(bias=bias, norm=norm)


@step_lowering(ops.pack)
def emit_pack(e: StepEmitter, node: Node) -> Operand | None:
    """Return the weights of an `ops.pack` concatenated as one operand; None if they cannot be packed."""
    return e.pack_params([w for w in node.inputs if isinstance(w, Param)])


@step_lowering(ops.norm_linear, when=refuse_activation)
def emit_linear(e: StepEmitter, node: Node) -> Var | tuple[Var, ...]:
    """Emit and return a linear map with the norm before and the activation after it. If the weights are packed and an
    `ops.split` is the only reader, return placeholders: `emit_split` emits the call."""
    if _find_split(node.output) is not None:
        return e.make_placeholders(node)
    call = make_product_call(e, node, "norm_linear")
    return call.set("activation", find_kernel_activation(node.attrs["activation"]), default="identity").emit(e)


def _find_split(product: Value) -> Node | None:
    """Return the `ops.split` node that is the only reader of `product`, a product by packed weights; else None."""
    linear, reader = product.producer, product.uses[0][0] if len(product.uses) == 1 else None
    packed = linear is not None and linear.op is ops.norm_linear and not isinstance(linear.operand("weight"), Param)
    return reader if packed and reader is not None and reader.op is ops.split else None


@step_lowering(ops.split)
def emit_split(e: StepEmitter, node: Node) -> tuple[Var, ...] | None:
    """Emit the product by packed weights that `node` splits, and return its parts; return None for other splits."""
    product = node.required_operand("x").producer
    if product is None or _find_split(product.output) is not node:
        return None
    e.enter(product)
    call = make_product_call(e, product, "norm_linear")
    widths = ", ".join(map(str, node.attrs["sizes"]))
    names = tuple(map(choose_name, node.outputs))
    return e.emit_tuple(f"{call}.split(({widths}), -1)", *call.operands, names=names)


@step_lowering(ops.head_linear)
def emit_head_linear(e: StepEmitter, node: Node) -> Var | None:
    """Emit and return a linear map with a weight per head; None if it is `inverse` or the weight is computed."""
    x, weight = node.operand("x"), node.operand("weight")
    if node.attrs["inverse"] or x is None or not isinstance(weight, Param):
        return None
    matrix = e.get_weight(weight)
    e.scope = e.find_scope(matrix)
    e.record_kernel("linear_by_head", refuse_gemv)
    return FunctionCall("linear_by_head").add(x, matrix, str(node.attrs["heads"])).emit(e)


@step_lowering(ops.norm_glu, when=refuse_activation)
def emit_glu(e: StepEmitter, node: Node) -> Var:
    """Emit and return a gated unit with its two projections and the norm before them."""
    return add_activation(make_product_call(e, node, "norm_glu"), node).emit(e, name="h")


@step_lowering(ops.linear_residual)
def emit_linear_residual(e: StepEmitter, node: Node) -> Var:
    """Emit and return a projection, added to the residual stream."""
    stream = node.required_operand("residual")
    call = make_product_call(e, node, "linear_residual", stream)
    call.set("scale", node.attrs["scale"], default=1).add_named(tickets=e.emit_tickets(node.output.width))
    return call.emit(e, name="x", replaces=stream)


@step_lowering(ops.rms_norm, ops.layer_norm)
def emit_norm(e: StepEmitter, node: Node) -> Var | None:
    """Emit and return a norm that no kernel has fused; return None if its weights are computed, not parameters."""
    gains = [node.operand(o.name) for o in node.op.operands[1:]]
    if any(g is not None and not isinstance(g, Param) for g in gains):
        return None
    module = e.make_norm("rms" if node.op is ops.rms_norm else "layer", node.attrs["eps"], *gains)
    e.scope = e.find_scope(module)
    return e.emit("{1}({0})", node.required_operand("x"), module)

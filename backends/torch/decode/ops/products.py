"""Linear layers of a decode step: with the norm before them, gates, activations and what they are added to."""

from __future__ import annotations

import torch

from weft.ir import ops
from weft.ir.graph import Node, Param, Value

from ...kernels.shared import gemv
from ...kernels.shared.activation import ACTIVATIONS
from ...ops.calls import Call
from ...program.emitter import local_name
from ...program.statements import Operand, Var
from ..emitter import StepEmitter
from ..registry import lowers


def few_rows(dtype: torch.dtype) -> str | None:
    """Say why the kernels of few rows do not multiply one token by weights of `dtype`; None if they do."""
    return gemv.refusal(torch.empty(1, 1, dtype=dtype, device="meta"))


def kernel_activation(name: str | None) -> str | None:
    """Return what kernels call the activation `name`, if they have it."""
    name = {"swish(1.702)": "gelu_quick", "swish(1.0)": "silu"}.get(name or "", name)
    return name if name in ACTIVATIONS else None


def unknown(e: StepEmitter, node: Node) -> str | None:
    """Return that kernels do not have the activation of `node`, or None."""
    name = node.attrs["activation"]
    return None if kernel_activation(name) else f"the activation is {name}"


def opening(call: Call, node: Node) -> Call:
    """Add the keywords activation, limit and shift of the gated unit `node` to `call`, and return it."""
    a = node.attrs
    call.set("activation", kernel_activation(a["activation"]), default="silu")
    return call.set("limit", a["limit"]).set("shift", a["shift"], default=0)


def weights(e: StepEmitter, node: Node) -> tuple[Operand | None, Operand | None, Operand | None]:
    """Return the weight, bias and norm of `node`, and emit from here on in the innermost scope that contains them."""
    found = e.weight(node.operand("weight")), e.weight(node.operand("bias")), e.norm_of(node)
    e.within(*found)
    return found


@lowers(ops.pack)
def pack(e: StepEmitter, node: Node) -> Operand | None:
    """Return the packed weights, which the class next to their modules holds."""
    return e.packed([w for w in node.inputs if isinstance(w, Param)])


@lowers(ops.norm_linear, when=unknown)
def linear(e: StepEmitter, node: Node) -> Var | tuple[Var, ...]:
    """Emit a linear map with the norm before and the activation after it; a packed one is emitted by its split."""
    if _pieces(node.output) is not None:
        return e.pending(node)
    weight, bias, norm = weights(e, node)
    e.chose("norm_linear", few_rows)
    call = Call("norm_linear").give(node.required("x"), weight).named(bias=bias, norm=norm)
    return call.set("activation", kernel_activation(node.attrs["activation"]), default="identity").emit(e)


def _pieces(product: Value) -> Node | None:
    """The split of a `product` by packed weights, if that alone reads it."""
    made, reader = product.producer, product.uses[0][0] if len(product.uses) == 1 else None
    packed = made is not None and made.op is ops.norm_linear and not isinstance(made.operand("weight"), Param)
    return reader if packed and reader is not None and reader.op is ops.split else None


@lowers(ops.split)
def side_by_side(e: StepEmitter, node: Node) -> tuple[Var, ...] | None:
    """Emit linear maps with packed weights as one product and its split."""
    made = node.required("x").producer
    if made is None or _pieces(made.output) is not node:
        return None
    e.enter(made)
    weight, bias, norm = weights(e, made)
    e.chose("norm_linear", few_rows)
    call = Call("norm_linear").give(made.required("x"), weight).named(bias=bias, norm=norm)
    widths = ", ".join(map(str, node.attrs["sizes"]))
    return e.many(f"{call}.split(({widths}), -1)", *call.operands, names=tuple(local_name(v) for v in node.outputs))


@lowers(ops.head_linear)
def by_head(e: StepEmitter, node: Node) -> Var | None:
    """A linear map of each head by itself."""
    x, weight = node.operand("x"), node.operand("weight")
    if node.attrs["inverse"] or x is None or not isinstance(weight, Param):
        return None
    own = e.weight(weight)
    e.within(own)
    e.chose("linear_by_head", few_rows)
    return Call("linear_by_head").give(x, own, str(node.attrs["heads"])).emit(e)


@lowers(ops.norm_glu, when=unknown)
def gated(e: StepEmitter, node: Node) -> Var:
    """A gated unit with both of its projections."""
    weight, bias, norm = weights(e, node)
    e.chose("norm_glu", few_rows)
    call = Call("norm_glu").give(node.required("x"), weight).named(bias=bias, norm=norm)
    return opening(call, node).emit(e, name="h")


@lowers(ops.linear_residual)
def added(e: StepEmitter, node: Node) -> Var:
    """A residual stream and what a projection adds to it."""
    weight, bias, norm = weights(e, node)
    stream: Value = node.required("residual")
    call = Call("linear_residual").give(node.required("x"), weight, stream).named(bias=bias, norm=norm)
    call.set("scale", node.attrs["scale"], default=1).named(tickets=e.tickets(node.output.width))
    e.chose("linear_residual", few_rows)
    return call.emit(e, name="x", replaces=stream)


@lowers(ops.rms_norm, ops.layer_norm)
def norm(e: StepEmitter, node: Node) -> Var | None:
    """A norm that not only kernels read."""
    gains = [node.operand(o.name) for o in node.op.operands[1:]]
    if any(g is not None and not isinstance(g, Param) for g in gains):
        return None
    made = e.norm("rms" if node.op is ops.rms_norm else "layer", node.attrs["eps"], *gains)
    e.within(made)
    return e.emit("{1}({0})", node.required("x"), made)

"""Linear layers of a decode step: with the norm before them, gates, activations and what they are added to."""

from __future__ import annotations

import torch

from weft.ir.graph import Node, Value

from ..blocks import is_kept
from ..kernels import gemv
from ..ops.elementwise import number
from ..program import Operand, Var
from . import patterns
from .emitter import Refusal, StepEmitter, options
from .patterns import Added, Projection


def few_rows(p: Projection) -> Refusal:
    """Why the kernels of few rows do not take the projection `p` of one token."""
    out, width = p.weight.type.concrete({})

    def refusal(dtype: torch.dtype) -> str | None:
        x, weight = (torch.empty(*shape, dtype=dtype, device="meta") for shape in ((1, width), (out, width)))
        return gemv.refusal(x, weight)

    return refusal


def _few_by_blocks(width: int) -> Refusal:
    """Why the kernel does not multiply one token by blocks of codes."""
    return lambda dtype: gemv.refusal(torch.empty(1, width, dtype=dtype, device="meta"))


def linear(e: StepEmitter, node: Node) -> Var | None:
    """A linear map, the norm before it included; one by blocks is the model's own, which calls a kernel too."""
    x = node.inputs[0]
    if is_kept(node) and x is not None:
        e.chose("quantized_linear", _few_by_blocks(x.width))
        return None
    found = patterns.projection(node.output)
    if found is None:
        e.declined("its weights are made by other nodes")
        return None
    return _linear(e, found, "")


def activated(e: StepEmitter, node: Node) -> Var | None:
    """An activation of a linear map."""
    found = patterns.activated(node)
    return None if found is None else _linear(e, found[0], f", activation={found[1]!r}")


def _linear(e: StepEmitter, p: Projection, more: str) -> Var:
    weight, norm = e.weight(p.weight), e.norm(p.source)
    bias = None if p.bias is None else e.weight(p.bias)
    e.within(weight, norm, bias)
    operands: list[Value | Operand] = [p.source.x, weight]
    text = options(operands, bias=bias, norm=norm)
    e.chose("norm_linear", few_rows(p), parts="norm" * (norm is not None))
    return e.emit(f"norm_linear({{0}}, {{1}}{text}{more})", *operands)


def gated(e: StepEmitter, node: Node) -> Var | None:
    """A gated unit with both of its projections."""
    found = patterns.gated(node)
    if isinstance(found, str):
        e.declined(found)
        return None
    gate, up = found
    weight = e.packed((gate.weight, up.weight))
    bias = None if gate.bias is None or up.bias is None else e.packed((gate.bias, up.bias))
    if weight is None or (gate.bias is not None and bias is None):
        e.declined("gate and up do not stand side by side")
        return None
    norm = e.norm(gate.source)
    e.within(weight, norm, bias)
    operands: list[Value | Operand] = [gate.source.x, weight]
    text = options(operands, bias=bias, norm=norm) + opening(node)
    e.chose("norm_glu", few_rows(gate), parts="norm, gate and up" if norm is not None else "gate and up")
    return e.emit(f"norm_glu({{0}}, {{1}}{text})", *operands, name="h")


def opening(node: Node) -> str:
    """The keywords that say how the gates of `node` open."""
    a = node.attrs
    activation = patterns.activation_name(a["activation"])
    text = "" if activation == "silu" else f", activation={activation!r}"
    text += "" if a["limit"] is None else f", limit={number(a['limit'])}"
    return text + ("" if not a["shift"] else f", shift={number(a['shift'])}")


def added(e: StepEmitter, stream: Value | Var, found: Added) -> Var:
    """`stream` and what a projection adds to it."""
    p = found.projection
    weight, norm = e.weight(p.weight), e.norm(found.norm)
    bias = None if p.bias is None else e.weight(p.bias)
    e.within(weight, norm, bias)
    operands: list[Value | Operand] = [p.source.x, weight, stream]
    text = options(operands, bias=bias, norm=norm)
    text += "" if found.scale == 1 else f", scale={number(found.scale)}"
    text += options(operands, tickets=e.tickets(p.value.width))
    e.chose("linear_residual", few_rows(p), parts=f"projection{' and its norm' * (norm is not None)}")
    return e.emit(f"linear_residual({{0}}, {{1}}, {{2}}{text})", *operands, name="x", replaces=2)

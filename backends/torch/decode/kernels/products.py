"""Linear layers of a decode step: with the norm before them, gates, activations and what they are added to."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.ir.graph import Node, Param, Value

from ...kernels.shared import gemv
from ...ops.elementwise import number
from ...program.quantized import is_kept
from ...program.statements import Operand, Statement, Var
from .. import patterns
from ..emitter import Refusal, StepEmitter, options
from ..patterns import Added, Projection


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


def by_head(e: StepEmitter, node: Node) -> Var | None:
    """A linear map of each head by itself."""
    x, weight = node.operand("x"), node.operand("weight")
    if node.attrs["inverse"] or x is None or not isinstance(weight, Param):
        return None
    held = e.weight(weight)
    e.within(held)
    e.chose("linear_by_head", lambda dtype: gemv.refusal(torch.empty(1, 1, dtype=dtype, device="meta")))
    return e.emit(f"linear_by_head({{0}}, {{1}}, {node.attrs['heads']})", x, held)


def _linear(e: StepEmitter, p: Projection, more: str) -> Var:
    weight, norm = e.weight(p.weight), e.norm(p.source)
    bias = None if p.bias is None else e.weight(p.bias)
    e.within(weight, norm, bias)
    operands: list[Value | Operand] = [p.source.x, weight]
    text = options(operands, bias=bias, norm=norm)
    e.chose("norm_linear", few_rows(p), parts="norm" * (norm is not None))
    made = e.emit(f"norm_linear({{0}}, {{1}}{text}{more})", *operands)
    if not more:
        e.linears[made] = p
    return made


def side_by_side(e: StepEmitter, statements: list[Statement]) -> list[Statement]:
    """`statements`, linear maps of the same value by modules that stand side by side as one product each."""
    alike: dict[object, list[Statement]] = {}
    for s in statements:
        if (p := e.linears.get(s.results[0]) if s.results else None) is not None:
            alike.setdefault((s.scope, s.operands[0], p.source, p.bias is None), []).append(s)
    packed: dict[Statement, Statement | None] = {}
    for group in alike.values():
        if len(group) > 1 and (one := _one(e, group)) is not None:
            packed |= dict.fromkeys(group) | {group[0]: one}
    found = (packed.get(s, s) for s in statements)
    return [s for s in found if s is not None]


def _one(e: StepEmitter, group: list[Statement]) -> Statement | None:
    """The linear maps of `group` as one; None if their weights do not stand side by side."""
    parts = [e.linears[s.results[0]] for s in group]
    biases = [p.bias for p in parts if p.bias is not None]
    weight, bias = e.packed([p.weight for p in parts]), e.packed(biases) if biases else None
    if weight is None or (biases and bias is None) or len({p.weight for p in parts}) != len(parts):
        return None
    operands: list[Value | Operand] = [group[0].operands[0], weight]
    text = options(operands, bias=bias, norm=e.norm(parts[0].source))
    widths = ", ".join(str(p.value.width) for p in parts)
    for choice in e.choices:
        if choice.node is group[0].node:
            others = [p.value.name.rpartition(".")[2] for p in parts[1:]]
            choice.parts = ", ".join([choice.parts, *others]).removeprefix(", ")
    return replace(
        group[0],
        text=f"norm_linear({{0}}, {{1}}{text}).split(({widths}), -1)",
        operands=tuple(e[o] if isinstance(o, Value) else o for o in operands),
        results=tuple(s.results[0] for s in group),
        replaces=None,
    )


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

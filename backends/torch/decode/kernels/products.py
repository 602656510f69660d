"""Linear layers of a decode step: with the norm before them, gates, activations and what they are added to."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.ir.graph import Node, Param, Value

from ...kernels.shared import gemv
from ...ops.calls import Call
from ...program.statements import Operand, Statement, Var
from .. import divided, patterns
from ..emitter import StepEmitter
from ..patterns import Added, Projection


def few_rows(dtype: torch.dtype) -> str | None:
    """Say why the kernels of few rows do not multiply one token by weights of `dtype`; None if they do."""
    return gemv.refusal(torch.empty(1, 1, dtype=dtype, device="meta"))


def linear(e: StepEmitter, node: Node) -> Var | None:
    """A linear map, the norm before it included."""
    found = patterns.projection(node.output)
    if found is None:
        e.declined("its weights are made by other nodes")
        return None
    return _linear(e, found)


def activated(e: StepEmitter, node: Node) -> Var | None:
    """An activation of a linear map."""
    found = patterns.activated(node)
    if found is None or divided.style(e, found[0].weight) in (divided.ROWS, divided.LOGITS):
        return None
    return _linear(e, *found)


def by_head(e: StepEmitter, node: Node) -> Var | None:
    """A linear map of each head by itself."""
    x, weight = node.operand("x"), node.operand("weight")
    if node.attrs["inverse"] or x is None or not isinstance(weight, Param):
        return None
    own = e.weight(weight)
    e.within(own)
    e.chose("linear_by_head", few_rows)
    return Call("linear_by_head").give(x, own, str(node.attrs["heads"])).emit(e)


def _linear(e: StepEmitter, p: Projection, activation: str = "") -> Var:
    weight, bias, norm = e.weight(p.weight), e.weight(p.bias), e.norm(p.source.node)
    e.within(weight, norm, bias)
    e.chose("norm_linear", few_rows, parts="norm" * (norm is not None))
    style = divided.style(e, p.weight)
    own = None if style == divided.ROWS else bias
    call = Call("norm_linear").give(p.source.x, weight).named(bias=own, norm=norm)
    made = call.set("activation", activation, default="").emit(e)
    if style:
        made = divided.whole(e, made, p.weight)
        return made if own is bias or bias is None else e.emit("{0} + {1}", made, bias, replaces=0)
    if not activation:
        e.linears[made] = p
    return made


def packed(e: StepEmitter, parts: list[Projection]) -> tuple[Operand, Operand | None] | None:
    """The weights of `parts` as one and their biases as one; None if they do not stand side by side."""
    biases = [p.bias for p in parts if p.bias is not None]
    weight, bias = e.packed([p.weight for p in parts]), e.packed(biases) if biases else None
    return None if weight is None or (biases and bias is None) else (weight, bias)


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
    packing = packed(e, parts)
    # `packed` holds a repeated weight only once, and the split below would then want more than there is.
    if packing is None or len({p.weight for p in parts}) != len(parts):
        return None
    weight, bias = packing
    call = Call("norm_linear").give(group[0].operands[0], weight).named(bias=bias, norm=e.norm(parts[0].source.node))
    widths = ", ".join(str(p.value.width) for p in parts)
    for choice in e.choices:
        if choice.node is group[0].node:
            others = [p.value.name.rpartition(".")[2] for p in parts[1:]]
            choice.parts = ", ".join([choice.parts, *others]).removeprefix(", ")
    return replace(
        group[0],
        text=f"{call}.split(({widths}), -1)",
        operands=tuple(e[o] if isinstance(o, Value) else o for o in call.operands),
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
    packing = packed(e, [gate, up])
    if packing is None:
        e.declined("gate and up do not stand side by side")
        return None
    (weight, bias), norm = packing, e.norm(gate.source.node)
    e.within(weight, norm, bias)
    e.chose("norm_glu", few_rows, parts="norm, gate and up" if norm is not None else "gate and up")
    call = Call("norm_glu").give(gate.source.x, weight).named(bias=bias, norm=norm)
    return opening(call, node).emit(e, name="h")


def opening(call: Call, node: Node) -> Call:
    """`call` with the keywords that say how the gates of `node` open."""
    a = node.attrs
    call.set("activation", patterns.kernel_activation(a["activation"]), default="silu")
    return call.set("limit", a["limit"]).set("shift", a["shift"], default=0)


def added(e: StepEmitter, stream: Value | Var, found: Added) -> Var:
    """`stream` and what a projection adds to it."""
    p = found.projection
    weight, bias, norm = e.weight(p.weight), e.weight(p.bias), e.norm(found.norm.node)
    e.within(weight, norm, bias)
    call = Call("linear_residual").give(p.source.x, weight, stream).named(bias=bias, norm=norm)
    call.set("scale", found.scale, default=1).named(tickets=e.tickets(p.value.width))
    call.named(group=divided.group(e) if divided.style(e, p.weight) == divided.ROWS else None)
    e.chose("linear_residual", few_rows, parts=f"projection{' and its norm' * (norm is not None)}")
    return call.emit(e, name="x", replaces=stream)

"""Recurrences of a decode step: one token of a convolution and of a state space, the state changed in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.passes.analysis.states import has_state, states

from ...kernels import conv_step, selective_scan, ssd
from ...ops.elementwise import activation
from ...program.emitter import local_name
from ...program.statements import CacheSlot, Operand, Submodule, Var
from .. import patterns
from ..emitter import StepEmitter, options
from ..gates import Ending, ending

KERNELS = {ops.causal_conv: "conv_step", ops.selective_scan: "selective_step", ops.ssd: "ssd_step"}
PLAIN = (ops.linear_attention, ops.gated_linear_attention)  # computed with torch
BY_TOKEN = ("x", "delta", "b", "c")  # operands with a row for each token


@dataclass(frozen=True)
class Given:
    """What a kernel makes an operand of: `value`, projected by `weight` after the `norm`, plus `bias`, through softplus
    where that is; any of these may be absent."""

    value: Value
    norm: Node | None = None
    weight: Param | None = None
    bias: Param | None = None
    softplus: bool = False


def recurrence(e: StepEmitter, node: Node) -> Var | None:
    """The output of a recurrence whose state is in the cache."""
    if node not in e.cached:
        return None
    if node.op not in KERNELS:
        e.declined("no kernel computes it token by token")
        return None
    if has_state(node):
        e.declined("its state is an operand")
        return None
    return _convolved(e, node) if node.op is ops.causal_conv else _stepped(e, Ending(node))


def ended(e: StepEmitter, node: Node) -> Var | None:
    """The gated and normed output of a recurrence whose state is in the cache, of all in one kernel."""
    found = ending(node)
    if found is None or found.node not in e.cached:
        return None
    if has_state(found.node):
        return None
    e.enter(found.node)
    if e.around(_norm(e, found)) != e.scope:
        return None
    e.reconsider()
    return _stepped(e, found, local_name(node.output))


def _convolved(e: StepEmitter, node: Node) -> Var:
    operands: list[Value | Operand] = [_value(node, "x"), _value(node, "weight")]
    bias = node.operand("bias")
    operands += [] if bias is None else [bias]
    known = activation_of(node)
    text = ("{0}[:, 0], {1}, None" if bias is None else "{0}[:, 0], {1}, {2}") + _state(node, operands)
    text += "" if known == "silu" else f", activation={known or 'identity'!r}"
    e.chose("conv_step", lambda dtype: _refusal(node, dtype), parts="state")
    made = e.emit(f"conv_step({text})[0][:, None]", *operands)
    return made if known else e.emit(activation(node.attrs["activation"]), made, replaces=0)


def _stepped(e: StepEmitter, found: Ending, name: str = "") -> Var:
    """One token of a state space, with what is before and behind it, as far as its weights stand in its scope."""
    node = found.node
    given = _operands(node)
    if e.around(*(o for g in given.values() for o in _weights(e, g))) != e.scope:
        given = {name: Given(_value(node, name)) for name in BY_TOKEN}
    operands: list[Value | Operand] = []
    texts = []
    for operand in node.op.operands[:6]:
        value = given[operand.name].value if operand.name in given else node.operand(operand.name)
        texts.append("None" if value is None else f"{{{len(operands)}}}{'[:, 0]' * (operand.name in given)}")
        operands += [] if value is None else [value]
    text = ", ".join(texts) + _state(node, operands) + _more(e, given, operands)
    if node.op is ops.ssd:
        text += f", heads={node.attrs['heads']}, groups={node.attrs['groups']}"
    if found.gate is not None:
        text += f", gate={{{len(operands)}}}[:, 0]"
        operands.append(found.gate)
    if (norm := _norm(e, found)) is not None:
        text += options(operands, norm=norm, tickets=e.tickets(found.groups))
        text += f", norm_groups={found.groups}" if found.groups > 1 else ""
    e.chose(KERNELS[node.op], lambda dtype: _refusal(node, dtype), parts=", ".join(_parts(given, found)))
    return e.emit(f"{KERNELS[node.op]}({text})[0][:, None]", *operands, name=name)


def _operands(node: Node) -> dict[str, Given]:
    """What `node` reads of each token, and what its kernel does with that."""
    found = {name: Given(_value(node, name)) for name in BY_TOKEN}
    found["delta"] = _step_size(node, found["delta"])
    if node.op is ops.selective_scan:
        found |= {name: _normed(found[name].value) for name in "bc"}
    return found


def _step_size(node: Node, delta: Given) -> Given:
    """Δ as the softplus of a projection, or of a sum with a bias."""
    made = delta.value.producer
    inner = None if made is None or made.op is not ops.softplus else made.inputs[0]
    if inner is None:
        return delta
    found = patterns.projection(inner)
    if found is not None and node.op is ops.selective_scan and patterns.single(inner):
        norm = found.source.node
        if norm is None or norm.op is ops.rms_norm:
            return Given(found.source.x, norm, found.weight, found.bias, softplus=True)
    add = inner.producer
    x, bias = (None, None) if add is None or add.op is not ops.add else add.inputs[:2]
    if isinstance(x, Param):
        x, bias = bias, x
    if x is not None and isinstance(bias, Param) and bias.shape == x.shape[-1:]:
        return Given(x, bias=bias, softplus=True)
    return Given(inner, softplus=True)


def _normed(value: Value) -> Given:
    """`value` as the RMS norm that only the recurrence reads."""
    node = value.producer
    if node is None or node.op is not ops.rms_norm or not patterns.is_norm(node) or not patterns.single(value):
        return Given(value)
    return Given(_value(node, "x"), node)


def _more(e: StepEmitter, given: dict[str, Given], operands: list[Value | Operand]) -> str:
    """The keywords that say what is done with what a kernel reads; their values join `operands`."""
    delta = given["delta"]
    text = options(operands, **{n: None if w is None else e.weight(w) for n, w in _projects(delta).items()})
    text += ", softplus=True" if delta.softplus else ""
    for name, keyword in (("delta", "norm"), ("b", "b_norm"), ("c", "c_norm")):
        if (node := given[name].norm) is not None:
            text += options(operands, **{keyword: e.norm_node(node)})
    return text


def _projects(given: Given) -> dict[str, Param | None]:
    return {"weight": given.weight, "bias": given.bias}


def _weights(e: StepEmitter, given: Given) -> list[Operand]:
    """The weights of what is done with an operand."""
    held: list[Operand] = [e.weight(w) for w in _projects(given).values() if w is not None]
    return held if given.norm is None else [*held, e.norm_node(given.norm)]


def _norm(e: StepEmitter, found: Ending) -> Submodule | None:
    """The norm of what is gated, whose gain is as wide as all of it."""
    return None if found.norm is None else e.norm_node(found.norm, found.gain)


def _parts(given: dict[str, Given], found: Ending) -> list[str]:
    """What a kernel computes beside the recurrence, as it is told."""
    delta = given["delta"]
    told = {
        "norms": any(g.norm is not None for g in given.values()),
        "projection of its step": delta.weight is not None,
        "softplus": delta.softplus,
        "state": True,
        "gate": found.gate is not None,
        "norm": found.norm is not None,
    }
    return [name for name, does in told.items() if does]


def _state(node: Node, operands: list[Value | Operand]) -> str:
    """The text of the state as it is before and after the token, the same place in the cache."""
    place = f"{{{len(operands)}}}.values[0]"
    operands.append(CacheSlot(states(node)[0].part, "", ""))
    return f", {place}, {place}"


def activation_of(node: Node) -> str | None:
    """The activation of a convolution as kernels call it; None if they have none of its name."""
    return patterns.activation_name(node.attrs["activation"])


def _refusal(node: Node, dtype: torch.dtype) -> str | None:
    """Why no kernel computes one token of `node`, its weights in `dtype`."""

    def like(name: str) -> torch.Tensor:
        value = _value(node, name)
        sizes = [s if isinstance(s, int) else 1 for s in value.shape]
        return torch.empty(sizes if name not in BY_TOKEN else sizes[::2], dtype=dtype, device="meta")

    if node.op is ops.causal_conv:
        return conv_step.refusal(like("x"))
    if node.op is ops.selective_scan:
        return selective_scan.refusal(like("x"), like("a"))
    return ssd.refusal(like("x"), like("b"), heads=node.attrs["heads"], groups=node.attrs["groups"])


def _value(node: Node, name: str) -> Value:
    value = node.operand(name)
    assert value is not None
    return value

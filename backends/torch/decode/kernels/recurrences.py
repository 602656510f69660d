"""Recurrences of a decode step: one token of a convolution, a state space, linear attention or the delta rule, the
state changed in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.ir.graph.step import Step
from weft.passes.analysis.states import has_state, states

from ...kernels import matrix_step, selective_scan, ssd
from ...kernels.shared import operands
from ...ops.calls import Call
from ...ops.elementwise import activation
from ...ops.scan import step_function, tuple_text
from ...program.emitter import local_name
from ...program.statements import CacheSlot, Operand, Var
from .. import patterns
from ..emitter import StepEmitter
from ..gates import Ending, ending, maker, single
from .scan_kernel import NoKernel, scan_kernel

KERNELS = {
    **{ops.causal_conv: "conv_step", ops.selective_scan: "selective_step", ops.ssd: "ssd_step"},
    **dict.fromkeys((ops.gated_linear_attention, ops.gated_delta_rule), "matrix_step"),
}
PLAIN = (ops.linear_attention,)  # computed with torch
BY_TOKEN = ("x", "delta", "b", "c")  # operands of a state space with a row for each token


@dataclass(frozen=True)
class Given:
    """The source of a kernel's operand: `value`, projected by `weight` after the `norm`, plus `bias`, through softplus
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
    if KERNELS[node.op] == "matrix_step":
        return _matrix(e, node)
    return _convolved(e, node) if node.op is ops.causal_conv else _stepped(e, Ending(node))


def scan(e: StepEmitter, node: Node) -> tuple[Var, ...] | None:
    """The outputs of a recurrence of one's own whose state is in the cache, of a kernel that is generated for it."""
    if node not in e.cached:
        return None
    if has_state(node):
        e.declined("its state is an operand")
        return None
    step: Step = node.attrs["step"]
    try:
        found = scan_kernel(step)
    except NoKernel as reason:
        e.declined(str(reason))
        return None
    function = step_function(e, step)
    name, values = f"{function}_kernel", [v for v in node.inputs if v is not None]
    e.kernels[name] = found.text.replace("{name}", name)
    call = Call("step_in_place").give(name, function)
    call.give(f"{call.place(CacheSlot(states(node)[0].part, '', ''))}.values")
    tokens, constants = values[: len(step.tokens)], values[len(step.tokens) :]
    call.arguments += [tuple_text([*map(call.place, part)]) for part in (tokens, constants) if part]
    outputs = tuple_text([tuple_text([*map(str, shape)]) for shape in found.outputs])
    call.arguments += [f"outputs={outputs}", f"count={found.count}", f"block={found.block}"]
    e.chose(name, lambda dtype: operands.refusal(torch.empty(1, dtype=dtype, device="meta")), parts="state")
    return e.many(str(call), *call.operands, names=tuple(v.name.rpartition(".")[2] for v in node.outputs))


def ended(e: StepEmitter, node: Node) -> Var | None:
    """The gated and normed output of a recurrence whose state is in the cache, of all in one kernel."""
    found = ending(node)
    if found is None or found.node not in e.cached:
        return None
    if has_state(found.node):
        return None
    e.enter(found.node)
    if e.around(e.norm(found.norm, found.gain)) != e.scope:
        return None
    # The recurrence alone was chosen when its node came; one kernel now computes it with what follows.
    e.reconsider()
    return _stepped(e, found, local_name(node.output))


def _convolved(e: StepEmitter, node: Node) -> Var:
    call, known = Call("conv_step"), patterns.kernel_activation(node.attrs["activation"])
    call.give(f"{call.place(node.required('x'))}[:, 0]", node.required("weight"), node.operand("bias"))
    _in_place(call, node).set("activation", known or "identity", default="silu")
    e.chose("conv_step", lambda dtype: _refusal(node, dtype), parts="state")
    made = call.emit(e, "[0][:, None]")
    return made if known else e.emit(activation(node.attrs["activation"]), made, replaces=0)


def _matrix(e: StepEmitter, node: Node) -> Var:
    """One token of linear attention or of the delta rule: its state is a matrix for each head."""
    call = Call("matrix_step")

    def row(name: str) -> str:
        return f"{call.place(node.required(name))}[:, 0]"

    _in_place(call.give(*map(row, "qkv")), node)
    call.set("heads", node.attrs["heads"]).set("groups", node.attrs["groups"], default=1)
    given = [o.name for o in node.op.operands if node.operand(o.name) is not None]
    call.arguments += [f"{name}={row(name)}" for name in ("decay", "beta") if name in given]
    e.chose("matrix_step", lambda dtype: _refusal(node, dtype), parts="state")
    return call.emit(e, "[0][:, None]")


def _stepped(e: StepEmitter, found: Ending, name: str = "") -> Var:
    """One token of a state space, with what is before and behind it, as far as its weights stand in its scope."""
    node = found.node
    given = _operands(node)
    if e.around(*(o for g in given.values() for o in _weights(e, g))) != e.scope:
        given = {name: Given(node.required(name)) for name in BY_TOKEN}
    call = Call(KERNELS[node.op])
    log_a = _exponent(node.required("a"))
    for operand in node.op.operands[:6]:
        if operand.name == "a" and log_a is not None:
            call.give(log_a)
        elif operand.name in given:
            call.give(f"{call.place(given[operand.name].value)}[:, 0]")
        else:
            call.give(node.operand(operand.name))
    _prepare(e, _in_place(call, node), given)
    call.set("log_a", log_a is not None, default=False)
    if node.op is ops.ssd:
        call.set("heads", node.attrs["heads"]).set("groups", node.attrs["groups"])
    if found.gate is not None:
        call.give(f"gate={call.place(found.gate)}[:, 0]")
    if (norm := e.norm(found.norm, found.gain)) is not None:
        call.named(norm=norm, tickets=e.tickets(found.groups)).set("norm_groups", found.groups, default=1)
    e.chose(KERNELS[node.op], lambda dtype: _refusal(node, dtype), parts=", ".join(_parts(given, found)))
    return call.emit(e, "[0][:, None]", name=name)


def _exponent(a: Value) -> Param | None:
    """The parameter that `a` is −exp of."""
    inner = maker(a, ops.neg)
    made = maker(inner.inputs[0], ops.exp) if inner is not None else None
    return made.inputs[0] if made is not None and isinstance(made.inputs[0], Param) else None


def _operands(node: Node) -> dict[str, Given]:
    """Return what `node` reads of each token, and what its kernel does with that."""
    found = {name: Given(node.required(name)) for name in BY_TOKEN}
    found["delta"] = _step_size(node, found["delta"])
    if node.op is ops.selective_scan:
        found |= {name: _normed(found[name].value) for name in "bc"}
    return found


def _step_size(node: Node, delta: Given) -> Given:
    """Δ as the softplus of a projection, or of a sum with a bias."""
    made = maker(delta.value, ops.softplus)
    inner = None if made is None else made.inputs[0]
    if inner is None:
        return delta
    found = patterns.projection(inner)
    if found is not None and node.op is ops.selective_scan and single(inner):
        norm = found.source.node
        if norm is None or norm.op is ops.rms_norm:
            return Given(found.source.x, norm, found.weight, found.bias, softplus=True)
    add = maker(inner, ops.add)
    x, bias = (None, None) if add is None else add.inputs[:2]
    if isinstance(x, Param):
        x, bias = bias, x
    if x is not None and isinstance(bias, Param) and bias.shape == x.shape[-1:]:
        return Given(x, bias=bias, softplus=True)
    return Given(inner, softplus=True)


def _normed(value: Value) -> Given:
    """`value` as the RMS norm that only the recurrence reads."""
    node = maker(value, ops.rms_norm)
    if node is None or not patterns.is_norm(node) or not single(value):
        return Given(value)
    return Given(node.required("x"), node)


def _prepare(e: StepEmitter, call: Call, given: dict[str, Given]) -> None:
    """Add the keywords that say what is done with what a kernel reads."""
    delta = given["delta"]
    call.named(weight=e.weight(delta.weight), bias=e.weight(delta.bias))
    call.set("softplus", delta.softplus, default=False)
    for name, keyword in (("delta", "norm"), ("b", "b_norm"), ("c", "c_norm")):
        call.named(**{keyword: e.norm(given[name].norm)})


def _weights(e: StepEmitter, given: Given) -> tuple[Operand | None, ...]:
    """The weights of what is done with an operand."""
    return e.weight(given.weight), e.weight(given.bias), e.norm(given.norm)


def _parts(given: dict[str, Given], found: Ending) -> list[str]:
    """Name what a kernel computes beside the recurrence."""
    delta = given["delta"]
    does = {
        "norms": any(g.norm is not None for g in given.values()),
        "projection of its step": delta.weight is not None,
        "softplus": delta.softplus,
        "state": True,
        "gate": found.gate is not None,
        "norm": found.norm is not None,
    }
    return [name for name, done in does.items() if done]


def _in_place(call: Call, node: Node) -> Call:
    """`call` with the state before the token and where that after it goes, the same place in the cache."""
    place = f"{call.place(CacheSlot(states(node)[0].part, '', ''))}.values[0]"
    return call.give(place, place)


def _refusal(node: Node, dtype: torch.dtype) -> str | None:
    """Say why no kernel computes one token of `node`, its weights in `dtype`."""

    def like(name: str) -> torch.Tensor:
        value = node.required(name)
        sizes = [s if isinstance(s, int) else 1 for s in value.shape]
        return torch.empty(sizes if name not in BY_TOKEN else sizes[::2], dtype=dtype, device="meta")

    if node.op is ops.causal_conv:
        return operands.refusal(like("x"))
    if KERNELS[node.op] == "matrix_step":
        state = [n for n in states(node)[0].row if isinstance(n, int)]
        return matrix_step.refusal(torch.empty(1, dtype=dtype, device="meta"), torch.empty(state, device="meta"))
    if node.op is ops.selective_scan:
        return selective_scan.refusal(like("x"), like("a"))
    return ssd.refusal(like("x"), like("b"), heads=node.attrs["heads"], groups=node.attrs["groups"])

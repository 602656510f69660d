"""Recurrences of a decode step: one token of a convolution, a state space, linear attention or the delta rule, the
state changed in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.ir import ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.graph.step import Step
from weft.ir.op import Op
from weft.passes.analysis.states import has_state, states

from ...kernels import matrix_step, selective_scan, ssd
from ...kernels.shared import operands
from ...ops.calls import Call
from ...ops.elementwise import activation
from ...ops.recurrent import features
from ...ops.scan import function_text, step_function, tuple_text
from ...program.emitter import local_name
from ...program.statements import CacheSlot, Operand, Var
from .. import patterns
from ..emitter import StepEmitter
from ..gates import MATRICES, Ending, ending, maker, single
from .scan_kernel import NoKernel, scan_kernel
from .scan_parts import products_apart

KERNELS = {
    **{ops.causal_conv: "conv_step", ops.selective_scan: "selective_step", ops.ssd: "ssd_step"},
    **dict.fromkeys((*MATRICES, ops.linear_attention), "matrix_step"),
}
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
    if has_state(node):
        e.declined("its state is an operand")
        return None
    if node.op is ops.causal_conv:
        return _convolved(e, node)
    if node.op is ops.linear_attention:
        return _linear(e, node)
    return _matrix(e, Ending(node)) if node.op in MATRICES else _stepped(e, Ending(node))


def scan(e: StepEmitter, node: Node) -> tuple[Var, ...] | None:
    """The outputs of a recurrence of one's own whose state is in the cache, of a kernel that is generated for it."""
    if node not in e.cached:
        return None
    if has_state(node):
        e.declined("its state is an operand")
        return None
    whole: Step = node.attrs["step"]
    apart = products_apart(whole)
    step = whole if apart is None else apart[1]
    try:
        found = scan_kernel(step)
    except NoKernel as reason:
        e.declined(str(reason))
        return None
    function = step_function(e, step)
    name = f"{function}_kernel"
    e.kernels[name] = found.text.replace("{name}", name)
    call = Call("step_in_place").give(name, function)
    state = f"{call.place(CacheSlot(states(node)[0].part, '', ''))}.values"
    values = [call.place(v) for v in node.inputs if v is not None]
    given = dict(zip((*whole.tokens, *whole.constants), values, strict=True))
    given |= {own: f"{state}[{i}]" for i, own in enumerate(whole.states)}
    tokens, constants = ([given[n] for n in part if n in given] for part in (step.tokens, step.constants))
    if apart is not None:
        tokens.append(f"*{_products(e, whole, apart[0], given)}")
    call.give(state)
    call.arguments += [tuple_text(part) for part in (tokens, constants) if part]
    outputs = tuple_text([tuple_text([*map(str, shape)]) for shape in found.outputs])
    call.arguments += [f"outputs={outputs}", f"count={found.count}", f"block={found.block}"]
    e.chose(name, lambda dtype: operands.refusal(torch.empty(1, dtype=dtype, device="meta")), parts="state")
    return e.many(str(call), *call.operands, names=tuple(v.name.rpartition(".")[2] for v in node.outputs))


def _products(e: StepEmitter, step: Step, products: Graph, given: Mapping[str, str]) -> str:
    """The call of a function that computes the `products` in a step of what is `given` for its inputs by name."""
    doc = "What a recurrence multiplies by weights before the rest of its step, of"
    function = e.function("products", function_text(products, [*products.outputs], doc))
    kinds = (step.states, step.tokens, step.constants)
    parts = [tuple_text([given[n] for n in kind if n in products.inputs]) for kind in kinds]
    return f"products_of({', '.join([function, *parts])})"


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
    kind = _matrix if found.node.op in MATRICES else _stepped
    return kind(e, found, local_name(node.output))


@dataclass(frozen=True)
class Unit:
    """Queries or keys as `scale` times `value`, or times what the `norm` of each head makes of it."""

    value: Value
    scale: float = 1.0
    norm: Node | None = None


def _convolved(e: StepEmitter, node: Node) -> Var:
    call, known = Call("conv_step"), patterns.kernel_activation(node.attrs["activation"])
    call.give(f"{call.place(node.required('x'))}[:, 0]", node.required("weight"), node.operand("bias"))
    _in_place(call, node).set("activation", known or "identity", default="silu")
    e.chose("conv_step", lambda dtype: _refusal(node, dtype), parts="state")
    made = call.emit(e, "[0][:, None]")
    return made if known else e.emit(activation(node.attrs["activation"]), made, replaces=0)


def _matrix(e: StepEmitter, found: Ending, name: str = "") -> Var:
    """One token of linear attention or of the delta rule, with what is before and behind it."""
    node, call = found.node, Call("matrix_step")
    given = {o.name: node.required(o.name) for o in node.op.operands if node.operand(o.name) is not None}
    q, k = (_unit(given[name], node) for name in "qk")
    if (q.norm and q.norm.attrs["eps"]) != (k.norm and k.norm.attrs["eps"]):
        q, k = Unit(given["q"]), Unit(given["k"])
    beta, beta_scale = patterns.scaled(given["beta"]) if "beta" in given else (None, 1.0)
    decay, a_log, bias = _fading(given.get("decay"), node)
    if e.around(e.weight(a_log), e.weight(bias)) != e.scope:
        decay, a_log, bias = given["decay"], None, None

    def row(value: Value) -> str:
        return f"{call.place(value)}[:, 0]"

    _in_place(call.give(*map(row, (q.value, k.value, given["v"]))), node)
    call.set("heads", node.attrs["heads"]).set("groups", node.attrs["groups"], default=1)
    rows = {"decay": decay, "beta": beta, "gate": found.gate}
    call.arguments += [f"{name}={row(value)}" for name, value in rows.items() if value is not None]
    call.named(a_log=e.weight(a_log), bias=e.weight(bias), unit=e.norm(q.norm))
    for name, scale in (("q", q.scale), ("k", k.scale), ("beta", beta_scale)):
        call.set(f"{name}_scale", scale, default=1.0)
    if found.norm is not None:
        call.named(norm=e.norm(found.norm, found.gain), tickets=e.tickets(found.groups))
        call.set("norm_groups", found.groups, default=1)
    does = {"norms": q.norm, "decay": a_log, "state": node, "norm": found.norm, "gate": found.gate}
    parts = ", ".join(name for name, done in does.items() if done is not None)
    e.chose("matrix_step", lambda dtype: _refusal(node, dtype), parts=parts)
    return call.emit(e, "[0][:, None]", name=name)


def _linear(e: StepEmitter, node: Node) -> Var:
    """One token of linear attention whose sum of keys is a second state."""
    call = Call("linear_step").give(CacheSlot(states(node)[0].part, "", ""), *features(e, node), node.required("v"))
    e.chose("matrix_step", lambda dtype: _refusal(node, dtype), parts="state")
    return call.give(str(node.attrs["heads"])).emit(e)


def _unit(value: Value, node: Node) -> Unit:
    """Queries or keys of `node` as a multiple of others, or of the norms of their heads."""
    flat = maker(value, ops.reshape)
    core, scale = patterns.scaled(value if flat is None else flat.required("x"))
    if flat is None:
        return Unit(core, scale)
    norm = maker(core, ops.rms_norm)
    apart = None if norm is None or norm.operand("weight") is not None else maker(norm.inputs[0], ops.reshape)
    x = None if apart is None else apart.inputs[0]
    heads = *value.shape[:2], node.attrs["groups"], value.width // node.attrs["groups"]
    fits = x is not None and apart is not None and x.shape == value.shape and apart.output.shape == heads
    return Unit(x, scale, norm) if fits and x is not None else Unit(value)


def _fading(decay: Value | None, node: Node) -> tuple[Value | None, Param | None, Param | None]:
    """A decay −e^a_log · softplus(step + bias) as step, a_log and bias; any other as it is."""
    flat = maker(decay, ops.reshape)
    made = maker(decay if flat is None else flat.inputs[0], ops.mul)
    for delta, rate in () if made is None else (made.inputs[:2], made.inputs[1::-1]):
        soft = maker(_before(delta, ops.reshape), ops.softplus)
        a_log = _exponent(_before(rate, ops.unsqueeze))
        inner = None if soft is None else _biased(soft.required("x"))
        if decay is None or a_log is None or inner is None:
            continue
        if inner.value.shape == decay.shape and a_log.shape == (node.attrs["heads"],):
            return inner.value, a_log, inner.bias
    return decay, None, None


def _before(value: Value | None, op: Op) -> Value | None:
    """`value` before an `op` that gave it another shape, if one did."""
    made = maker(value, op)
    return value if made is None else made.inputs[0]


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


def _exponent(a: Value | None) -> Param | None:
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
    return _biased(inner)


def _biased(inner: Value) -> Given:
    """The softplus of `inner`, or of a sum with a bias if it is one."""
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

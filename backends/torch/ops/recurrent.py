"""Recurrences: convolutions over time, state-space layers, linear attention; what they carry is a `State`."""

from __future__ import annotations

from collections.abc import Sequence

from weft.ir import ops
from weft.ir.graph import Node, Param
from weft.ir.op import StateSpec
from weft.passes.analysis.states import states

from ..program.emitter import Emitter
from ..program.registry import lowering
from ..program.statements import CacheSlot, Var
from .calls import Call
from .elementwise import activation, number

PAST = "{past}"  # in a call: the state before


def carried(e: Emitter, node: Node, call: Call, count: int = 1) -> tuple[Var, ...]:
    """The outputs of `node` from a `call`, which returns a result, or a tuple of `count`, and a state.

    `PAST` among its arguments is the state before: the operands of the node, or what the cache keeps, if there is one.
    """

    def text(past: str) -> str:
        return str(call).replace(PAST, past)

    parts = states(node)
    own = [call.place(v) for spec in parts if (v := node.operand(spec.taken)) is not None]
    names = [v.name.rpartition(".")[2] for v in node.outputs]

    def apart(made: Var, names: Sequence[str]) -> tuple[Var, ...]:
        return e.many("{0}", made, names=tuple(names)) if len(names) > 1 else (made,)

    if own:
        past = own[0] if len(own) == 1 else f"({', '.join(own)})"
        y, present = e.many(text(past), *call.operands, names=(names[0], "present"))
        return *apart(y, names[:count]), *apart(present, names[count:])
    if node not in e.cached:
        return apart(e.emit(f"{text('None')}[0]", *call.operands), names)
    return apart(e.keep_state(node, CacheSlot(*_slot(parts)), len(parts), text, call.operands), names)


def _slot(parts: tuple[StateSpec, ...]) -> tuple[str, str, str]:
    """Name, making and type of what keeps the states `parts`: sums of all tokens stay in f32."""
    tensors = []
    for spec in parts:
        sizes, dtype = ", ".join(map(str, ("batch", *spec.row))), ", dtype=torch.float32" * spec.kind.accumulates
        filled = f"full(({sizes}), {number(spec.initial)}" if spec.initial else f"zeros({sizes}"
        tensors.append(f"{{like}}.new_{filled}{dtype})")
    if not any(spec.initial for spec in parts):
        return parts[0].part, f"State({', '.join(tensors)})", "State"
    starts = f"({', '.join(number(spec.initial) for spec in parts)},)"
    return parts[0].part, f"FilledState({', '.join(tensors)}, starts={starts})", "State"


@lowering(ops.causal_conv)
def _causal_conv(e: Emitter, node: Node) -> tuple[Var, ...]:
    x, weight, bias = e.shown(node.required("x")), node.required("weight"), node.operand("bias")
    # A table, such as that of a shift by one token, stays f32 when weights are cast.
    fixed = isinstance(weight, Param) and weight.recipe.constant
    taps = e.emit("{0}.to({1}.dtype)", weight, x, name="taps") if fixed else weight
    operands, act = [x, taps, *([] if bias is None else [bias])], node.attrs["activation"]
    if node not in e.cached and node.operand("past") is None:
        outputs: tuple[Var, ...] = (Call("causal_conv").give(*operands).emit(e, replaces=x),)
    else:
        outputs = carried(e, node, Call("causal_conv_from").give(PAST, *operands))
    return outputs if act == "identity" else (e.emit(activation(act), outputs[0], replaces=0), *outputs[1:])


@lowering(ops.selective_scan, ops.ssd)
def _state_space(e: Emitter, node: Node) -> tuple[Var, ...]:
    given = [node.operand(o.name) for o in node.op.operands[:6]]
    mamba2 = node.op is ops.ssd
    function = ("run_mamba2" if mamba2 else "run_mamba") if e.calls_kernels else node.op.name
    call = Call(function).give(given[0], e.shown(node.required("delta")), *given[2:], PAST)
    if mamba2:
        call.set("heads", e.attr(node, "heads")).set("groups", e.attr(node, "groups"))
    return carried(e, node, call)


@lowering(ops.gated_linear_attention, ops.gated_delta_rule)
def _linear_recurrence(e: Emitter, node: Node) -> tuple[Var, ...]:
    changes, decay = node.op is ops.gated_delta_rule, node.operand("decay")
    q, k, v = (node.required(name) for name in "qkv")
    call = Call("linear_recurrence").give(q, e.shown(k), e.shown(v) if changes else v)
    beta = e.shown(node.required("beta")) if changes else None
    call.named(gates=None if decay is None else e.shown(decay), beta=beta).arguments.append(f"past={PAST}")
    return carried(e, node, call.set("heads", e.attr(node, "heads")).set("groups", e.attr(node, "groups")))


@lowering(ops.linear_attention)
def _linear_attention(e: Emitter, node: Node) -> tuple[Var, ...]:
    operands, heads = (*features(e, node), node.required("v")), e.attr(node, "heads")
    if not node.attrs["causal"]:
        return (Call("linear_attention").give(*operands, str(heads)).emit(e),)
    return carried(e, node, Call("causal_linear_attention").give(*operands, PAST).set("heads", heads))


def features(e: Emitter, node: Node) -> tuple[Var, Var, Var, Var]:
    """The features of queries and keys of a linear attention, zero where these are masked, and both turned by its
    positions, if it has them."""
    heads, mask = e.attr(node, "heads"), node.operand("key_mask")
    q = e.emit("elu_plus_one({0})", node.required("q"), name="q", replaces=0)
    k = e.emit("elu_plus_one({0})", node.required("k"), name="k", replaces=0)
    if mask is not None:
        k = e.emit("{0} * ({1} != 0)[..., None]", k, mask, name="k", replaces=0)
    keys = e.shown(k)
    assert isinstance(keys, Var)
    positions, frequencies = node.operand("positions"), node.operand("frequencies")
    if positions is None or frequencies is None:
        return q, keys, q, keys
    text = "rotary({0}, {1})"
    at = e[positions], e[frequencies]
    cos, sin = e.hoist_many((text, *at), text, *at, names=("cos", "sin"))
    turn = "rotate_pairs" if node.attrs["interleaved"] else "rotate"
    text = f"{turn}({{0}}.unflatten(-1, ({heads}, -1)).transpose(1, 2), {{1}}, {{2}}).transpose(1, 2).flatten(2)"
    turned_q, turned_k = (e.emit(text, x, cos, sin, name=f"turned_{n}") for n, x in (("q", q), ("k", keys)))
    return q, keys, turned_q, turned_k

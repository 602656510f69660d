"""Recurrences: causal convolutions, state-space layers and linear attention, whose states a `RecurrentState` stores."""

from __future__ import annotations

from collections.abc import Sequence

from weft.ir import ops
from weft.ir.graph import Node, Param
from weft.ir.op import StateSpec
from weft.passes.analysis.states import find_states

from ..program.emitter import Emitter
from ..program.registry import lowering
from ..program.statements import CacheSlot, Var
from .calls import FunctionCall
from .elementwise import format_number, write_activation

PAST = "{past}"  # the placeholder of the previous state in a call


def emit_recurrence(e: Emitter, node: Node, call: FunctionCall, count: int = 1) -> tuple[Var, ...]:
    """Emit the recurrence `node` and return its outputs. `call` returns (result, new state); the result is a tuple if
    `count`, the number of outputs that are not states, is above 1. `PAST` among its arguments becomes the previous
    state: operands of the node, the state in the cache, or None."""

    def text(past: str) -> str:
        return str(call).replace(PAST, past)

    parts = find_states(node)
    states_in = [call.placeholder(v) for spec in parts if (v := node.operand(spec.past_operand)) is not None]
    names = [v.name.rpartition(".")[2] for v in node.outputs]

    def unpack(made: Var, names: Sequence[str]) -> tuple[Var, ...]:
        return e.emit_tuple("{0}", made, names=tuple(names)) if len(names) > 1 else (made,)

    if states_in:
        past = states_in[0] if len(states_in) == 1 else f"({', '.join(states_in)})"
        y, present = e.emit_tuple(text(past), *call.operands, names=(names[0], "present"))
        return *unpack(y, names[:count]), *unpack(present, names[count:])
    if node not in e.cached:
        return unpack(e.emit(f"{text('None')}[0]", *call.operands), names)
    return unpack(e.emit_with_state(node, CacheSlot(*_describe_slot(parts)), len(parts), text, call.operands), names)


def _describe_slot(parts: tuple[StateSpec, ...]) -> tuple[str, str, str]:
    """Return name, constructor and type of the cache slot for the states `parts`; those that accumulate are f32."""
    tensors = []
    for spec in parts:
        sizes, dtype = ", ".join(map(str, ("batch", *spec.row_shape))), ", dtype=torch.float32" * spec.kind.accumulates
        filled = f"full(({sizes}), {format_number(spec.initial)}" if spec.initial else f"zeros({sizes}"
        tensors.append(f"{{like}}.new_{filled}{dtype})")
    if not any(spec.initial for spec in parts):
        return parts[0].part, f"RecurrentState({', '.join(tensors)})", "RecurrentState"
    starts = f"({', '.join(format_number(spec.initial) for spec in parts)},)"
    return parts[0].part, f"FilledState({', '.join(tensors)}, starts={starts})", "RecurrentState"


@lowering(ops.causal_conv)
def _causal_conv(e: Emitter, node: Node) -> tuple[Var, ...]:
    x, weight, bias = e.zero_padding(node.required_operand("x")), node.required_operand("weight"), node.operand("bias")
    # A table, such as that of a shift by one token, stays f32 when weights are cast.
    fixed = isinstance(weight, Param) and weight.recipe.is_constant
    taps = e.emit("{0}.to({1}.dtype)", weight, x, name="taps") if fixed else weight
    operands, act = [x, taps, *([] if bias is None else [bias])], node.attrs["activation"]
    if node not in e.cached and node.operand("past") is None:
        outputs: tuple[Var, ...] = (FunctionCall("causal_conv").add(*operands).emit(e, replaces=x),)
    else:
        outputs = emit_recurrence(e, node, FunctionCall("causal_conv_from").add(PAST, *operands))
    return outputs if act == "identity" else (e.emit(write_activation(act), outputs[0], replaces=0), *outputs[1:])


@lowering(ops.selective_scan, ops.ssd, kernels=True)
def _state_space_kernel(e: Emitter, node: Node) -> tuple[Var, ...]:
    return _emit_state_space(e, node, "run_mamba2" if node.op is ops.ssd else "run_mamba")


@lowering(ops.selective_scan, ops.ssd)
def _state_space(e: Emitter, node: Node) -> tuple[Var, ...]:
    return _emit_state_space(e, node, node.op.name)


def _emit_state_space(e: Emitter, node: Node, function: str) -> tuple[Var, ...]:
    operands = [node.operand(o.name) for o in node.op.operands[:6]]
    call = FunctionCall(function)
    call.add(operands[0], e.zero_padding(node.required_operand("delta")), *operands[2:], PAST)
    if node.op is ops.ssd:
        call.set("heads", e.attr(node, "heads")).set("groups", e.attr(node, "groups"))
    return emit_recurrence(e, node, call)


@lowering(ops.gated_linear_attention, ops.gated_delta_rule)
def _linear_recurrence(e: Emitter, node: Node) -> tuple[Var, ...]:
    changes, decay = node.op is ops.gated_delta_rule, node.operand("decay")
    q, k, v = (node.required_operand(name) for name in "qkv")
    call = FunctionCall("linear_recurrence").add(q, e.zero_padding(k), e.zero_padding(v) if changes else v)
    beta = e.zero_padding(node.required_operand("beta")) if changes else None
    call.add_named(gates=None if decay is None else e.zero_padding(decay), beta=beta).arguments.append(f"past={PAST}")
    return emit_recurrence(e, node, call.set("heads", e.attr(node, "heads")).set("groups", e.attr(node, "groups")))


@lowering(ops.linear_attention)
def _linear_attention(e: Emitter, node: Node) -> tuple[Var, ...]:
    operands, heads = (*emit_features(e, node), node.required_operand("v")), e.attr(node, "heads")
    if not node.attrs["causal"]:
        return (FunctionCall("linear_attention").add(*operands, str(heads)).emit(e),)
    return emit_recurrence(e, node, FunctionCall("causal_linear_attention").add(*operands, PAST).set("heads", heads))


def emit_features(e: Emitter, node: Node) -> tuple[Var, Var, Var, Var]:
    """Emit and return (q, k, rotated q, rotated k): features elu(x) + 1 of queries and keys, 0 for masked keys, and the
    same rotated by position (RoPE). Without positions, rotated and plain features are the same."""
    heads, mask = e.attr(node, "heads"), node.operand("key_mask")
    q = e.emit("elu_plus_one({0})", node.required_operand("q"), name="q", replaces=0)
    k = e.emit("elu_plus_one({0})", node.required_operand("k"), name="k", replaces=0)
    if mask is not None:
        k = e.emit("{0} * ({1} != 0)[..., None]", k, mask, name="k", replaces=0)
    keys = e.zero_padding(k)
    assert isinstance(keys, Var)
    positions, frequencies = node.operand("positions"), node.operand("frequencies")
    if positions is None or frequencies is None:
        return q, keys, q, keys
    text = "rotary({0}, {1})"
    at = e[positions], e[frequencies]
    cos, sin = e.hoist_tuple((text, *at), text, *at, names=("cos", "sin"))
    function = "rotate_pairs" if node.attrs["interleaved"] else "rotate"
    text = f"{function}({{0}}.unflatten(-1, ({heads}, -1)).transpose(1, 2), {{1}}, {{2}}).transpose(1, 2).flatten(2)"
    rotated_q, rotated_k = (e.emit(text, x, cos, sin, name=f"turned_{n}") for n, x in (("q", q), ("k", keys)))
    return q, keys, rotated_q, rotated_k

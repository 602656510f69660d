"""Recurrences: convolutions over time, state-space layers, linear attention; what they carry is a `State`."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Node, Value
from weft.ir.op import StateSpec
from weft.passes.analysis.states import states

from ..program.emitter import Emitter
from ..program.registry import lowering
from ..program.statements import CacheSlot, Operand, Var
from .elementwise import activation


def carried(e: Emitter, node: Node, text: str, *given: Value | Operand) -> tuple[Var, ...]:
    """The outputs of `node` from the part `text`, which returns a result and a state.

    ``{past}`` in `text` is the state before: the operands of the node, or what the cache keeps, if there is one.
    """
    parts, first = states(node), len(given)
    own = [v for spec in parts if (v := node.operand(spec.taken)) is not None]
    name = node.output.name.rpartition(".")[2]
    if own:
        past = f"{{{first}}}" if len(own) == 1 else f"({{{first}}}, {{{first + 1}}})"
        names = (name, *(v.name.rpartition(".")[2] for v in node.outputs[1:]))
        made = e.many(text.replace("{past}", past), *given, *own, names=(names[0], "present"))
        if len(own) == 1:
            return made
        return made[0], *e.many("{0}", made[1], names=names[1:])
    if node not in e.cached:
        return (e.emit(f"{text.replace('{past}', 'None')}[0]", *given),)
    slot = CacheSlot(*_slot(parts))
    kept = text.replace("{past}", f"resumed({{{first}}})")
    return (e.emit(f"keep({{{first}}}, {kept})", *given, slot),)


def _slot(parts: tuple[StateSpec, ...]) -> tuple[str, str, str]:
    """Name, making and type of what keeps the states `parts`: sums of all tokens stay in f32."""
    tensors = []
    for spec in parts:
        sizes = ", ".join(map(str, ("batch", *spec.row)))
        tensors.append(f"{{like}}.new_zeros({sizes}{', dtype=torch.float32' if spec.kind.accumulates else ''})")
    return parts[0].part, f"State({', '.join(tensors)})", "State"


@lowering(ops.causal_conv)
def _causal_conv(e: Emitter, node: Node) -> tuple[Var, ...]:
    x, weight, bias = node.required("x"), node.required("weight"), node.operand("bias")
    rest = ", {2}" if bias is not None else ""
    given = [v for v in (x, weight, bias) if v is not None]
    if node not in e.cached and node.operand("past") is None:
        made: tuple[Var, ...] = (e.emit(f"causal_conv({{0}}, {{1}}{rest})", *given, replaces=0),)
    else:
        made = carried(e, node, f"causal_conv_from({{past}}, {{0}}, {{1}}{rest})", *given)
    if node.attrs["activation"] == "identity":
        return made
    return e.emit(activation(node.attrs["activation"]), made[0], replaces=0), *made[1:]


@lowering(ops.selective_scan)
def _selective_scan(e: Emitter, node: Node) -> tuple[Var, ...]:
    given = [v for v in node.inputs[:6] if v is not None]
    places = [f"{{{i}}}" for i in range(len(given))] + ["None"] * (6 - len(given))
    return carried(e, node, f"selective_scan({', '.join(places)}, {{past}})", *given)


@lowering(ops.ssd)
def _ssd(e: Emitter, node: Node) -> tuple[Var, ...]:
    given = [v for v in node.inputs[:6] if v is not None]
    places = [f"{{{i}}}" for i in range(len(given))] + ["None"] * (6 - len(given))
    shape = f"heads={node.attrs['heads']}, groups={node.attrs['groups']}"
    return carried(e, node, f"ssd({', '.join(places)}, {{past}}, {shape})", *given)


@lowering(ops.gated_linear_attention)
def _gated_linear_attention(e: Emitter, node: Node) -> tuple[Var, ...]:
    q, k, v, decay = node.required("q"), node.required("k"), node.required("v"), node.operand("decay")
    heads, groups = node.attrs["heads"], node.attrs["groups"]
    part = "plain_linear_attention"
    if decay is not None:
        part = "gated_linear_attention" if decay.width == heads else "keyed_linear_attention"
        if decay.width == heads and k.width == groups:  # keys of one number: a gate for every key is one for every head
            part = "gated_linear_attention"
    gates = ", {3}" if decay is not None else ""
    text = f"{part}({{0}}, {{1}}, {{2}}{gates}, {{past}}, heads={heads}, groups={groups})"
    return carried(e, node, text, *(t for t in (q, k, v, decay) if t is not None))


@lowering(ops.linear_attention)
def _linear_attention(e: Emitter, node: Node) -> tuple[Var, ...]:
    heads, mask = node.attrs["heads"], node.operand("key_mask")
    q = e.emit("elu_plus_one({0})", node.required("q"), name="q", replaces=0)
    k = e.emit("elu_plus_one({0})", node.required("k"), name="k", replaces=0)
    if mask is not None:
        k = e.emit("{0} * ({1} != 0)[..., None]", k, mask, name="k", replaces=0)
    turned = q, k
    positions, frequencies = node.operand("positions"), node.operand("frequencies")
    if positions is not None and frequencies is not None:
        text = "rotary({0}, {1})"
        at = e[positions], e[frequencies]
        cos, sin = e.hoist_many((text, *at), text, *at, names=("cos", "sin"))
        turn = "rotate_pairs" if node.attrs["interleaved"] else "rotate"
        text = f"{turn}({{0}}.unflatten(-1, ({heads}, -1)).transpose(1, 2), {{1}}, {{2}}).transpose(1, 2).flatten(2)"
        turned = e.emit(text, q, cos, sin, name="turned_q"), e.emit(text, k, cos, sin, name="turned_k")
    given = q, k, *turned, node.required("v")
    if not node.attrs["causal"]:
        return (e.emit(f"linear_attention({{0}}, {{1}}, {{2}}, {{3}}, {{4}}, {heads})", *given),)
    return carried(
        e, node, f"causal_linear_attention({{0}}, {{1}}, {{2}}, {{3}}, {{4}}, {{past}}, heads={heads})", *given
    )

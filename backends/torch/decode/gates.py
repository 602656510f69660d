"""The gate and the norm behind a recurrence, which its kernel computes with it; and the makers of values."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.ir.op import Op


def maker(value: Value | None, *ops: Op) -> Node | None:
    """Return the node that makes `value`, if it is one of `ops`."""
    node = None if value is None else value.producer
    return node if node is not None and node.op in ops else None


def single(value: Value) -> bool:
    """Return whether `value` is read once."""
    return len(value.uses) == 1 and not value.is_output


def sole_maker(value: Value | None, *ops: Op) -> Node | None:
    """Return the `maker` of `value`, if what it makes is read once."""
    node = maker(value, *ops)
    return node if node is not None and single(node.output) else None


MATRICES = (ops.gated_linear_attention, ops.gated_delta_rule)  # recurrences whose state is a matrix for each head


@dataclass(frozen=True)
class Ending:
    """norm(y ⊙ silu(gate)) of the recurrence `node`, whose output is y; `norm` is the node of an RMS norm of each of
    `groups` parts, if there is one, and `gain` its weight [width], if it has one. Of a recurrence among MATRICES it is
    norm(y) ⊙ gate, and the gain that of a part."""

    node: Node
    gate: Value | None = None
    norm: Node | None = None
    gain: Param | None = None
    groups: int = 1


def ending(node: Node) -> Ending | None:
    """`node` taken as the last of what follows a recurrence: its gate, or in Mamba-2 its norm."""
    if node.op is ops.mul:
        return _gated(node) or _normed_in_parts(node) or _gated_norm(node)
    return _normed(node) if node.op is ops.rms_norm else None


def _gated(node: Node | None) -> Ending | None:
    """y ⊙ silu(gate), in either order."""
    for y, silu in () if node is None else (node.inputs[:2], node.inputs[1::-1]):
        recurrent, swish = sole_maker(y, ops.selective_scan, ops.ssd), maker(silu, ops.swish)
        if recurrent is not None and swish is not None and swish.attrs["beta"] == 1:
            gate = swish.inputs[0]
            if gate is not None and gate.shape == recurrent.output.shape:
                return Ending(recurrent, gate)
    return None


def _normed(node: Node) -> Ending | None:
    """An RMS norm of all that is gated."""
    weight = node.operand("weight")
    found = _of_heads(node.inputs[0])
    if found is None or not (weight is None or isinstance(weight, Param)):
        return None
    return Ending(found.node, found.gate, node, weight)


def _normed_in_parts(node: Node) -> Ending | None:
    """RMS norms of parts of what is gated, taken apart and put together, times a weight."""
    whole, gain = node.inputs[:2]
    if isinstance(whole, Param):
        whole, gain = gain, whole
    put = sole_maker(whole, ops.reshape)
    norm = None if put is None else sole_maker(put.inputs[0], ops.rms_norm)
    apart = None if norm is None else sole_maker(norm.inputs[0], ops.reshape)
    if put is None or norm is None or apart is None or not isinstance(gain, Param):
        return None
    found = _of_heads(apart.inputs[0])
    if found is None or norm.operand("weight") is not None or len(apart.output.shape) != 4:
        return None
    groups = apart.output.shape[2]
    if not isinstance(groups, int) or found.node.attrs["heads"] % groups:
        return None
    same = put.output.shape == found.node.output.shape and gain.shape == found.node.output.shape[-1:]
    return Ending(found.node, found.gate, norm, gain, groups) if same else None


def _gated_norm(node: Node) -> Ending | None:
    """norm(y) ⊙ gate, in either order, with a norm of each head or of all heads together."""
    for y, gate in (node.inputs[:2], node.inputs[1::-1]):
        put = sole_maker(y, ops.reshape)
        norm = sole_maker(y if put is None else put.inputs[0], ops.rms_norm)
        apart = None if norm is None or put is None else sole_maker(norm.inputs[0], ops.reshape)
        if norm is None or gate is None or (put is not None and apart is None):
            continue
        recurrent, weight = sole_maker((norm if apart is None else apart).inputs[0], *MATRICES), norm.operand("weight")
        if recurrent is None or not (weight is None or isinstance(weight, Param)):
            continue
        groups = 1 if apart is None else apart.output.shape[2] if len(apart.output.shape) == 4 else 0
        whole = recurrent.output.shape == gate.shape == node.output.shape
        if whole and isinstance(groups, int) and groups > 0 and recurrent.attrs["heads"] % groups == 0:
            return Ending(recurrent, gate, norm, weight, groups)
    return None


def _of_heads(value: Value | None) -> Ending | None:
    """`value` taken as what a recurrence of heads gives, gated, if only who asks reads it."""
    found = _gated(sole_maker(value, ops.mul))
    return found if found is not None and found.node.op is ops.ssd else None

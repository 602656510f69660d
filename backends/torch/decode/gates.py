"""The gate and the norm behind a recurrence, which its kernel computes with it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import ops
from weft.ir.graph import Node, Param, Value


@dataclass(frozen=True)
class Ending:
    """norm(y ⊙ silu(gate)) of the recurrence `node`, whose output is y; `norm` is the node of an RMS norm of each of
    `groups` parts, if there is one, and `gain` its weight [width], if it has one."""

    node: Node
    gate: Value | None = None
    norm: Node | None = None
    gain: Param | None = None
    groups: int = 1


def ending(node: Node) -> Ending | None:
    """`node` taken as the last of what follows a recurrence: its gate, or in Mamba-2 its norm."""
    if node.op is ops.mul:
        return _gated(node) or _normed_in_parts(node)
    return _normed(node) if node.op is ops.rms_norm else None


def _gated(node: Node) -> Ending | None:
    """y ⊙ silu(gate), in either order."""
    for y, silu in (node.inputs[:2], node.inputs[1::-1]):
        made, swish = (None if v is None else v.producer for v in (y, silu))
        if made is None or swish is None or made.op not in (ops.selective_scan, ops.ssd) or swish.op is not ops.swish:
            continue
        gate = swish.inputs[0]
        if _once(made) and swish.attrs["beta"] == 1 and gate is not None and gate.shape == made.output.shape:
            return Ending(made, gate)
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
    put = None if whole is None else whole.producer
    if put is None or put.op is not ops.reshape or not _once(put) or not isinstance(gain, Param):
        return None
    norm = None if put.inputs[0] is None else put.inputs[0].producer
    if norm is None or norm.op is not ops.rms_norm or not _once(norm) or norm.operand("weight") is not None:
        return None
    apart = None if norm.inputs[0] is None else norm.inputs[0].producer
    if apart is None or apart.op is not ops.reshape or not _once(apart) or len(apart.output.shape) != 4:
        return None
    found = _of_heads(apart.inputs[0])
    groups = apart.output.shape[2]
    if found is None or not isinstance(groups, int) or found.node.attrs["heads"] % groups:
        return None
    same = put.output.shape == found.node.output.shape and gain.shape == found.node.output.shape[-1:]
    return Ending(found.node, found.gate, norm, gain, groups) if same else None


def _of_heads(value: Value | None) -> Ending | None:
    """`value` taken as what a recurrence of heads gives, gated, if only who asks reads it."""
    node = None if value is None else value.producer
    if node is None or node.op is not ops.mul or not _once(node):
        return None
    found = _gated(node)
    return found if found is not None and found.node.op is ops.ssd else None


def _once(node: Node) -> bool:
    """Tell whether what `node` makes is read once."""
    return len(node.output.uses) == 1 and not node.output.is_output

"""Ops that treat batch rows independently: a step of such ops can process all tokens of a sequence as batch rows."""

from __future__ import annotations

from weft.ir import Node, Value, ops
from weft.ir.graph.step import BATCH
from weft.ir.op import Trait

# Ops that treat all axes independently except those in their attribute "axes" or "axis".
ALONG_AXES = {
    *(ops.sum, ops.mean, ops.max, ops.min, ops.prod, ops.softmax, ops.cumsum),
    *(ops.split, ops.slice_, ops.concat, ops.pad),
}


def _has_batch_axis(value: Value) -> bool:
    return value.shape[:1] == (BATCH,)


def is_rowwise(node: Node) -> bool:
    """Return whether batch row i of the outputs of `node` depends only on batch row i of its operands.

    Return False for ops without a rule, and if an operand has a batch axis but an output has none.
    """
    operands = [v for v in node.inputs if v is not None]
    if not any(map(_has_batch_axis, operands)):
        return not any(map(_has_batch_axis, node.outputs)) or node.op is ops.expand
    if not all(map(_has_batch_axis, node.outputs)):
        return False
    first, rank = operands[0], len(node.output.shape)
    if Trait.ELEMENTWISE in node.op.traits:
        return all(len(v.shape) == rank if _has_batch_axis(v) else _is_broadcast(v, rank) for v in operands)
    if node.op is ops.matmul:
        return _is_rowwise_product(*operands)
    if not _has_batch_axis(first):
        return False
    if Trait.ROWWISE in node.op.traits:
        return len(first.shape) > 1 and not any(map(_has_batch_axis, operands[1:]))
    if Trait.VIEW in node.op.traits or node.op in (ops.embedding, ops.one_hot):
        return True
    if node.op in ALONG_AXES:
        return all(map(_has_batch_axis, operands)) and acts_after_axis(node, 0, len(first.shape))
    if node.op is ops.transpose:
        return bool(node.attrs["axes"][0] == 0)
    if node.op is ops.expand:
        return len(first.shape) == rank
    if node.op is ops.gather:
        return bool(node.attrs["axis"] % len(first.shape)) and not _has_batch_axis(operands[1])
    return False


def acts_after_axis(node: Node, last: int, rank: int) -> bool:
    """Return whether `node`, an op in `ALONG_AXES` on operands of this `rank`, works along axes after `last` only."""
    axes = node.attrs["axes"] if "axes" in node.attrs else (node.attrs["axis"],)
    return all(axis % rank > last for axis in axes)


def _is_broadcast(value: Value, rank: int) -> bool:
    """Return whether `value`, without a batch axis, broadcasts along the batch axis of a value of this `rank`."""
    return len(value.shape) < rank or value.shape[:1] == (1,)


def _is_rowwise_product(x: Value, y: Value) -> bool:
    if _has_batch_axis(x) and _has_batch_axis(y):
        return len(x.shape) == len(y.shape) > 2
    rows, matrix = (x, y) if _has_batch_axis(x) else (y, x)
    if len(rows.shape) > 2:
        return _is_broadcast(matrix, len(rows.shape))
    return rows is x and len(rows.shape) == 2 == len(matrix.shape)

"""Ops that treat batch rows independently: a step of such ops can run on all tokens of a sequence as batch rows."""

from __future__ import annotations

from weft.ir import Node, Value, ops
from weft.ir.graph.step import BATCH
from weft.ir.op import Trait

_ALONG_AXES = {
    *(ops.sum, ops.mean, ops.max, ops.min, ops.prod, ops.softmax, ops.cumsum),
    *(ops.split, ops.slice_, ops.concat, ops.pad),
}


def _is_row(value: Value) -> bool:
    return value.shape[:1] == (BATCH,)


def keeps_rows(node: Node) -> bool:
    """Return whether batch row i of the outputs of `node` depends only on batch row i of its operands.

    Return False for ops without a rule, and where an output lacks the batch axis of an operand.
    """
    operands = [v for v in node.inputs if v is not None]
    if not any(map(_is_row, operands)):
        return not any(map(_is_row, node.outputs)) or node.op is ops.expand
    if not all(map(_is_row, node.outputs)):
        return False
    first, rank = operands[0], len(node.output.shape)
    if Trait.ELEMENTWISE in node.op.traits:
        return all(len(v.shape) == rank if _is_row(v) else _broadcasts(v, rank) for v in operands)
    if node.op is ops.matmul:
        return _multiplies_rows(*operands)
    if not _is_row(first):
        return False
    if Trait.ROWWISE in node.op.traits:
        return len(first.shape) > 1 and not any(map(_is_row, operands[1:]))
    if Trait.VIEW in node.op.traits or node.op in (ops.embedding, ops.one_hot):
        return True
    if node.op in _ALONG_AXES:
        axes = node.attrs["axes"] if "axes" in node.attrs else (node.attrs["axis"],)
        return all(map(_is_row, operands)) and all(axis % len(first.shape) for axis in axes)
    if node.op is ops.transpose:
        return bool(node.attrs["axes"][0] == 0)
    if node.op is ops.expand:
        return len(first.shape) == rank
    if node.op is ops.gather:
        return bool(node.attrs["axis"] % len(first.shape)) and not _is_row(operands[1])
    return False


def _broadcasts(value: Value, rank: int) -> bool:
    """Return whether `value`, without a batch axis, broadcasts along the batch axis of a value of this `rank`."""
    return len(value.shape) < rank or value.shape[:1] == (1,)


def _multiplies_rows(x: Value, y: Value) -> bool:
    """Return whether matmul(x, y), with a batch axis in x, y or both, treats batch rows independently."""
    if _is_row(x) and _is_row(y):
        return len(x.shape) == len(y.shape) > 2
    rows, matrix = (x, y) if _is_row(x) else (y, x)
    if len(rows.shape) > 2:
        return _broadcasts(matrix, len(rows.shape))
    return rows is x and len(rows.shape) == 2 == len(matrix.shape)

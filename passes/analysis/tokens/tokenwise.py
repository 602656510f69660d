"""Classify ops by whether they treat tokens independently.

A value *carries tokens* if its first two axes are [batch, seq] of the token ids; its row (b, t) is the slice of token t
of sequence b. Caches and pruned prefixes need nodes that compute row (b, t) of their outputs from the same rows.
"""

from __future__ import annotations

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.op import Trait
from weft.ir.types.sizes import Size

from ..recurrences.rows import ALONG_AXES, acts_after_axis
from ..states import find_tokens

Tokens = tuple[Size, Size]  # the sizes of the axes [batch, seq]


def find_token_axes(graph: Graph) -> Tokens | None:
    """Return the sizes (batch, seq) of the token input of `graph`, else of its first causal attention, else None."""
    if (ids := find_tokens(graph)) is not None and len(ids.shape) > 1:
        return ids.shape[0], ids.shape[1]
    for node in graph.nodes:
        if node.op is ops.attention and node.attrs["causal"]:
            return node.output.shape[0], node.output.shape[1]
    return None


def has_token_axes(value: Value | None, tokens: Tokens) -> bool:
    """Return whether `value` is not a parameter and its first two axes are `tokens`."""
    return value is not None and not isinstance(value, Param) and value.shape[:2] == tokens


def find_token_operands(node: Node, tokens: Tokens) -> tuple[int, ...] | None:
    """Return the indices of the operands of `node` that carry tokens; None if `node` mixes tokens, or may mix them."""
    rows = tuple(i for i, v in enumerate(node.inputs) if has_token_axes(v, tokens))
    if not rows or not all(has_token_axes(v, tokens) for v in node.outputs):
        return None
    op, x = node.op, node.inputs[0]
    if Trait.ELEMENTWISE in op.traits:
        rank = len(node.output.shape)
        return rows if all(_is_aligned(v, i in rows, rank) for i, v in enumerate(node.inputs)) else None
    if Trait.ROWWISE in op.traits:
        return rows if 0 in rows and x is not None and len(x.shape) > 2 else None
    if Trait.VIEW in op.traits:  # from [batch, seq, ...] to [batch, seq, ...], perhaps without further axes
        return rows if 0 in rows else None
    if op in (ops.embedding, ops.one_hot, ops.embed_tokens, ops.rotary_angles):
        return rows if 0 in rows and len(node.output.shape) > 2 else None
    if op in ALONG_AXES:
        return rows if x and len(rows) == len(node.inputs) and acts_after_axis(node, 1, len(x.shape)) else None
    if op is ops.expand:
        return rows if x is not None and 2 < len(x.shape) == len(node.output.shape) else None
    if op is ops.gather:
        return rows if rows == (0,) and x is not None and node.attrs["axis"] % len(x.shape) >= 2 else None
    if op is ops.transpose:
        return rows if node.attrs["axes"][:2] == (0, 1) else None
    if op is ops.matmul:
        ranks = [0 if v is None else len(v.shape) for v in node.inputs]
        if rows == (0, 1):  # one matrix per token
            return rows if ranks[0] == ranks[1] > 3 else None
        # By one matrix, or by matrices along axes after those of tokens.
        return rows if rows == (0,) and ranks[0] > 2 and ranks[1] <= max(2, ranks[0] - 2) else None
    if op is ops.attention:  # over keys that are not these tokens
        return rows if rows == (0,) and not node.attrs["causal"] and node.operand("bias") is None else None
    return None


def _is_aligned(value: Value | None, carrying: bool, rank: int) -> bool:
    """Return whether `value` broadcasts to an output of `rank` axes without mixing tokens.
    An operand that carries tokens (`carrying`) must have that rank; others need size 1 at axis 1, or no such axis."""
    if value is None:
        return True
    if carrying:
        return len(value.shape) == rank
    axis = 1 - (rank - len(value.shape))
    return axis < 0 or value.shape[axis] == 1

"""Lowerings of the delta rule: ONNX Runtime's LinearAttention, or a Scan over tokens in standard operators."""

from __future__ import annotations

from typing import Any

import onnx_ir as onnx

from weft.ir import ops
from weft.ir.graph import Node
from weft.ir.types import dtypes

from ..emitter import Emitter
from ..lowering import contrib, lowering, standard
from .layers import MS
from .recurrences import head_sizes, narrow, start_state, wide, zeros

_OPERANDS = ("q", "k", "v", "beta", "decay", "past")


@lowering(ops.gated_delta_rule, targets=contrib)
def LinearAttention(e: Emitter, node: Node) -> list[onnx.Value]:
    q, k, v, beta, decay, past = (wide(e, node.operand(n)) for n in _OPERANDS)
    groups, heads, d, dv = head_sizes(node)
    if past is None and node.output.type.dtype != dtypes.f32:  # the kernel sums in the type of the past
        past = zeros(e, node.output.shape[0], heads, d, dv)
    rule: dict[str, Any] = {"update_rule": "delta" if decay is None else "gated_delta", "scale": 1.0}
    sizes: dict[str, Any] = {"q_num_heads": groups, "kv_num_heads": heads}
    return narrow(e, node, e.many("LinearAttention", q, k, v, past, decay, beta, domain=MS, outputs=2, **sizes, **rule))


@lowering(ops.gated_delta_rule, targets=standard)
def DeltaScan(e: Emitter, node: Node) -> list[onnx.Value]:
    """Token by token: a step costs a few products with the state, which stays in the processor's cache."""
    q, k, v, beta, decay, past = (wide(e, node.operand(n)) for n in _OPERANDS)
    groups, heads, d, dv = head_sizes(node)
    grid = [groups, heads // groups]

    def step(state: Any, q: Any, k: Any, v: Any, beta: Any, *decay: Any) -> tuple[Any, Any]:
        """`state` [batch, groups, heads of a group, d, dv]; q and k are rows, shared by the heads of a group."""
        if decay:
            state = e.op("Mul", decay[0], state)
        change = e.op("Mul", beta, e.op("Sub", v, e.op("MatMul", k, state)))
        column = e.op("Transpose", k, perm=[0, 1, 2, 4, 3])
        state = e.op("Add", state, e.op("Mul", column, change))
        return state, e.op("MatMul", q, state)

    row = [groups, 1, 1, d]
    shapes = [(q, row), (k, row), (v, [*grid, 1, dv]), (beta, [*grid, 1, 1])]
    if decay is not None:
        per_key = node.required("decay").width == heads * d
        shapes.append((e.op("Exp", decay), [*grid, d if per_key else 1, 1]))
    parts = [e.op("Reshape", x, e.constant([0, 0, *shape])) for x, shape in shapes]
    state, y = e.scan(step, [start_state(e, node, past, *grid, d, dv)], parts)
    y = e.op("Reshape", y, e.constant([0, 0, heads * dv]))
    return narrow(e, node, [y, e.op("Reshape", state, e.constant([0, heads, d, dv]))])

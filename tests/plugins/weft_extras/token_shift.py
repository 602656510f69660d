"""An op with a state: the tokens one place later, as RWKV mixes them (Peng 2023, arXiv 2305.13048)."""

import numpy as np

from weft.ir import ops
from weft.ir.op import Array, OpCall, StateKind, StateSpec, Value, build_fixed_size_spec, case, normal, op
from weft.ir.ops import concat, gather, iota, pad
from weft.ir.types import TensorType


@op(outputs="shifted present", cases=[case(normal(2, 5, 3)), case(normal(2, 5, 3), normal(2, 1, 3))])
def token_shift(x: Array, past: Array | None = None) -> Array | tuple[Array, Array]:
    """y_t = x_{t−1}, x [batch, seq, width]; before the first token stands `past` [batch, 1, width], or zeros."""
    before = np.zeros_like(x[:, :1]) if past is None else past
    shifted = np.concatenate([before, x[:, :-1]], 1)
    return shifted if past is None else (shifted, x[:, -1:])


@token_shift.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    return (n.x,) if n.past is None else (n.x, n.past)


@token_shift.states
def _(n: OpCall) -> tuple[StateSpec, ...]:
    return (build_fixed_size_spec(StateKind.CONV, n.x, 1, n.x.shape[2]),)


@token_shift.body
def _(n: OpCall) -> Value | tuple[Value, Value]:
    padded = pad(n.x, axis=1, before=1) if n.past is None else concat(n.past, n.x, axis=1)
    at = iota(n.x, axis=1)
    shifted = gather(padded, at, axis=1)
    if n.past is None:
        return shifted
    return shifted, gather(n.x, ops.max(at, axes=(0,), keepdims=True), axis=1)

"""Rotary positions and softmax attention in one op, for kernels that turn queries and keys while they read them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..op import Array, Cost, OpCall, StateSpec, TensorType, Trait, Value, case, normal, op
from .rotary import rope
from .softmax_attention import attention, attention_cost, attention_states

_STEP = (normal(2, 3, 32), normal(2, 3, 16), normal(2, 3, 16))
_AT = np.array([[0, 1, 2], [4, 5, 6]])
_CACHE = (normal(2, 2, 9, 8), normal(2, 2, 9, 8))
_GQA = {"heads": 4, "kv_heads": 2, "causal": True}
SHARED = tuple(name for name in attention.attrs if name != "value_dim")  # attributes of both


@op(
    outputs="attention present_k present_v",
    traits=[Trait.ATTENTION, Trait.SOFTMAX],
    cases=[
        case(*_STEP, _AT, normal(4), **_GQA),
        case(*_STEP, _AT, normal(2), heads=4, kv_heads=2, interleaved=True, amplitude=1.3, softcap=2.0),
        case(*_STEP, _AT, normal(3), normal(1, 4, 3, 3), np.array([[1, 1, 0], [1, 1, 1]]), **_GQA, scale=0.2),
        case(*_STEP, _AT, normal(4), None, None, normal(4), *_CACHE, **_GQA, window=3, interleaved=True),
        case(*_STEP, _AT, normal(4), None, None, None, *_CACHE, **_GQA, window=4, rolling=True),
    ],
)
def rotary_attention(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    frequencies: Array,
    bias: Array | None = None,
    key_mask: Array | None = None,
    sinks: Array | None = None,
    past_k: Array | None = None,
    past_v: Array | None = None,
    *,
    heads: int,
    kv_heads: int,
    causal: bool = False,
    window: int | None = None,
    keep_first: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    pattern: str = "dense",
    stride: int = 1,
    summary: int = 1,
    rolling: bool = False,
    interleaved: bool = False,
    amplitude: float = 1.0,
) -> Array | tuple[Array, ...]:
    """`attention` of rope(q) and rope(k) over v: q and k of one text, turned by `positions` · `frequencies` (Su 2021).

    q [batch, seq, heads·d], k [batch, seq, kv_heads·d], v [batch, seq, kv_heads·dv], positions [batch, seq],
    frequencies [pairs] → [batch, seq, heads·dv]; `interleaved` and `amplitude` are those of `rope`, everything else is
    as in `attention`. With the caches past_k and past_v, which hold turned keys, `positions` are those in the cache
    too, and present_k and present_v are returned.
    """
    turned = [
        rope.reference(x, positions, frequencies, heads=count, interleaved=interleaved, amplitude=amplitude)
        for x, count in ((q, heads), (k, kv_heads))
    ]
    found: Array | tuple[Array, ...] = attention.reference(
        *(*turned, v, bias, key_mask, sinks, past_k, past_v, None if past_k is None else positions),
        heads=heads,
        kv_heads=kv_heads,
        causal=causal,
        window=window,
        keep_first=keep_first,
        scale=scale,
        softcap=softcap,
        pattern=pattern,
        stride=stride,
        summary=summary,
        rolling=rolling,
    )
    return found


def _rotations(n: OpCall) -> list[tuple[list[Any], dict[str, Any]]]:
    """Operands and attributes of `rope` for q and for k."""
    turn = {"interleaved": n.interleaved, "amplitude": n.amplitude}
    sides = ((n.q, n.heads), (n.k, n.kv_heads))
    return [([x, n.positions, n.frequencies], {"heads": heads, **turn}) for x, heads in sides]


def _scored(n: OpCall, q: Any, k: Any) -> tuple[list[Any], dict[str, Any]]:
    """Operands and attributes of `attention` of the turned `q` and `k`."""
    positions = None if n.past_k is None else n.positions
    operands = [q, k, n.v, n.bias, n.key_mask, n.sinks, n.past_k, n.past_v, positions]
    return operands, attention.check_attrs({name: getattr(n, name) for name in SHARED})


@rotary_attention.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    q, k = (rope.types(*rotation)[0] for rotation in _rotations(n))
    return attention.types(*_scored(n, q, k))


@rotary_attention.cost
def _(n: OpCall) -> Cost:
    scored = attention_cost(OpCall(attention, *_scored(n, n.q, n.k)))
    return scored + Cost((n.q.elements + n.k.elements) * 3, n.positions.bytes + n.frequencies.bytes, 0)


@rotary_attention.states
def _(n: OpCall) -> tuple[StateSpec, ...]:
    return attention_states(n)


@rotary_attention.body
def _(n: OpCall) -> tuple[Value, ...]:
    operands, attrs = _scored(n, *(rope(*x, **turn) for x, turn in _rotations(n)))
    return attention.emit(*operands, **attrs)

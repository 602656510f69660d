"""Compute ops with the functions of backends/torch/lib, and compare them with the ops' references in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from weft.backends.torch.lib import biases, convolution, experts, indexing, routing, softmax_attention, state_space
from weft.backends.torch.lib import chunked_recurrences as recurrences
from weft.backends.torch.lib import linear_per_head as products
from weft.ir import lookup
from weft.ir.op import Case, Op

Tensors = tuple[Tensor, ...]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Roundings to the dtype on the way to a result: one, unless intermediate results are kept in the dtype.
ROUNDINGS = {
    "route": 2,  # the weight, then times the scale
    "moe": 6,  # up, gate, activation, their product, down, the sum over experts
    "causal_conv": 3,  # the sum, the sigmoid in silu, their product
    "relative_attention": 12,  # both scores, their sum, the softmax, both products, their sum; e^x for x up to 5
}
TERMS = 150  # tokens of the longest case


def drawn(case: Case, dtype: torch.dtype) -> list[Tensor | None]:
    """Draw the operands of a case, floats rounded to `dtype`."""
    found = [None if a is None else torch.from_numpy(np.array(a)) for a in case.draw()]
    return [t.to(dtype) if t is not None and t.is_floating_point() else t for t in found]


def reference(op: Op, operands: list[Tensor | None], **attrs: Any) -> tuple[NDArray[np.float64], ...]:
    """Evaluate all outputs of `op` on these operands with its reference."""
    arrays = [None if t is None else (t.double() if t.is_floating_point() else t).numpy() for t in operands]
    made = op.reference(*arrays, **attrs)
    return made if isinstance(made, tuple) else (made,)


def assert_close(got: Tensor, want: NDArray[np.float64], roundings: float, terms: int) -> None:
    """Check that `got` is `want` up to `roundings` to its dtype and sums of `terms` products in f32 (f64 for f64),
    relative to the largest element of `want`. Scores of −∞, which mask keys, must be in the same places."""
    hidden = np.isneginf(want)
    np.testing.assert_array_equal(got.isneginf().numpy(), hidden)
    got, want = got.masked_fill(got.isneginf(), 0), np.where(hidden, 0, want)
    inner = torch.finfo(torch.promote_types(got.dtype, torch.float32)).eps
    bound = 0.5 * roundings * torch.finfo(got.dtype).eps + 8 * inner * terms**0.5
    scale = max(float(np.abs(want).max(initial=0)), 1e-30)
    error = float(np.abs(got.detach().double().numpy() - want).max(initial=0)) / scale
    assert error <= bound, f"{error:.2e} is more than {bound:.2e}"


# -- routers


def route(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2",
) -> Tensor:
    """Call the router of the library for these attributes if it has one, else compose one of its functions."""
    kind = (scoring, renormalize, bias is not None, groups > 1 and group_score)
    ready: dict[Any, Callable[[], Tensor]] = {
        ("softmax", True, False, False): lambda: routing.route_softmax(logits, k),
        ("softmax", False, False, False): lambda: routing.route_switch(logits, k),
        ("sigmoid", False, False, False): lambda: routing.route_sigmoid(logits, k),
        ("softmax", False, False, "max"): lambda: routing.route_softmax_groups(logits, k, groups, top_groups),
    }
    if kind in ready:
        return ready[kind]() * scale
    if kind == ("sigmoid", True, True, "top2") and bias is not None:
        return routing.route_sigmoid_groups(logits, bias, k, groups, top_groups) * scale
    scores = indexing.wide(logits)
    scores = F.softmax(scores, dim=-1) if scoring == "softmax" else scores.sigmoid()
    ranks = scores if bias is None else scores + bias
    if groups > 1:
        best = routing.best_of_groups if group_score == "max" else routing.best_two_of_groups
        ranks = routing.mask_groups(ranks, best(ranks, groups), top_groups)
    kept = routing.keep_top(scores, ranks, k)
    return ((routing.renormalize(kept) if renormalize else kept) * scale).to(logits.dtype)


def _capped(part: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor, *, capacity: int | None = None, factor: float = 1.0, batched: bool = False) -> Tensor:
        rows = x.flatten(0, -2) if batched else x
        limit = routing.expert_capacity(rows.shape[-2], rows.shape[-1], factor) if capacity is None else capacity
        return part(rows, limit).view_as(x)

    return call


# -- experts


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "swish(1.702)": lambda x: x * torch.sigmoid(1.702 * x),
}


def moe(
    x: Tensor,
    combine: Tensor,
    up: Tensor,
    down: Tensor,
    gate: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    limit: float | None = None,
    shift: float = 0.0,
    active: int | None = None,
    form: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Compute a mixture of experts with `form`, by default `moe`, which chooses between the forms."""
    stacks = {"up": up, "down": down, "gate": gate, "up_bias": up_bias, "down_bias": down_bias, "gate_bias": gate_bias}
    given = {name: t for name, t in stacks.items() if t is not None}

    def expert(linear: Callable[..., Tensor], rows: Tensor, *tensors: Tensor) -> Tensor:
        w = dict(zip(given, tensors, strict=True))
        hidden, act = linear(rows, w["up"], w.get("up_bias")), ACTIVATIONS[activation]
        if "gate" in w:
            opened = linear(rows, w["gate"], w.get("gate_bias"))
            if limit is not None:
                opened, hidden = opened.clamp(max=limit), hidden.clamp(-limit, limit)
            hidden = act(opened) * (hidden + shift)
        else:
            hidden = act(hidden)
        return linear(hidden, w["down"], w.get("down_bias"))

    k = combine.shape[-1] if active is None else active
    return (form or experts.moe)(x, combine, k, expert, *given.values())


# -- recurrences


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    past: Tensor | None = None,
    *,
    heads: int,
    groups: int = 1,
) -> Tensors:
    return recurrences.linear_recurrence(q, k, v, decay, None, past, heads=heads, groups=groups)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None = None,
    past: Tensor | None = None,
    *,
    heads: int,
    groups: int = 1,
) -> Tensors:
    return recurrences.linear_recurrence(q, k, v, decay, beta, past, heads=heads, groups=groups)


def turned(x: Tensor, positions: Tensor, frequencies: Tensor, heads: int, interleaved: bool) -> Tensor:
    """Rotate all pairs of the heads of x, as `rope` does."""
    angles = (positions[..., None] * frequencies)[:, :, None]
    xh = x.unflatten(-1, (heads, -1))
    pairs = xh.unflatten(-1, (-1, 2)) if interleaved else xh.unflatten(-1, (2, -1)).mT
    a, b = pairs.unbind(-1)
    pairs = torch.stack((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
    return (pairs if interleaved else pairs.mT).flatten(2)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    positions: Tensor | None = None,
    frequencies: Tensor | None = None,
    past_state: Tensor | None = None,
    past_norm: Tensor | None = None,
    *,
    heads: int,
    causal: bool = False,
    interleaved: bool = False,
) -> Tensors:
    q, k = recurrences.elu_plus_one(q), recurrences.elu_plus_one(k)
    if key_mask is not None:
        k = k * (key_mask != 0)[..., None]
    rq, rk = q, k
    if positions is not None and frequencies is not None:
        rq, rk = (turned(t, positions, indexing.wide(frequencies), heads, interleaved) for t in (q, k))
    if not causal:
        return (recurrences.linear_attention(q, k, rq, rk, v, heads),)
    past = None if past_state is None or past_norm is None else (past_state, past_norm)
    y, present = recurrences.causal_linear_attention(q, k, rq, rk, v, past, heads=heads)
    return y, *present


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, past: Tensor | None = None, *, activation: str = "identity"
) -> Tensors:
    act = F.silu if activation == "silu" else lambda y: y
    if past is None:
        return (act(convolution.causal_conv(x, weight, bias)),)
    y, present = convolution.causal_conv_from(past, x, weight, bias)
    return act(y), present


def ssd(*operands: Tensor | None, heads: int, groups: int = 1) -> Tensors:
    part: Any = state_space.ssd
    found: Tensors = part(*operands, heads=heads, groups=groups)
    return found


# -- attention by distance


def relative_position_bias(
    table: Tensor, queries: Tensor, keys: Tensor, *, bidirectional: bool = True, max_distance: int = 128
) -> Tensor:
    part = biases.relative_bias if bidirectional else biases.causal_relative_bias
    return part(table, keys[:, None] - queries[:, :, None], max_distance)


def alibi(slopes: Tensor, queries: Tensor, keys: Tensor, *, symmetric: bool = False) -> Tensor:
    distance = keys[:, None] - queries[:, :, None]
    return biases.alibi(slopes, -distance.abs() if symmetric else distance)


def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_table: Tensor,
    value_table: Tensor | None = None,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    *,
    heads: int,
    causal: bool = False,
) -> Tensors:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    at = torch.arange(q.shape[2])[None]
    if past_k is not None and past_v is not None and positions is not None:
        at, k = positions, indexing.scatter_rows(past_k, k, positions, 2)
        v = indexing.scatter_rows(past_v, v, positions, 2)
    distance = torch.arange(k.shape[2]) - at[:, :, None]
    seen = distance[:, None] <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)[:, None]
    seen = seen if key_mask is None else seen & (key_mask != 0)[:, None, None]
    y = biases.relative_attention(q, k, v, key_table, value_table, distance, seen).transpose(1, 2).flatten(2)
    return (y,) if past_k is None else (y, k, v)


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, heads: int, kv_heads: int, **attrs: Any
) -> Tensor:
    qh, kh, vh = (t.unflatten(-1, (n, -1)).transpose(1, 2) for t, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
    shown = None if key_mask is None else (key_mask != 0)[:, None, None]
    return softmax_attention.block_sparse_attention(qh, kh, vh, shown, **attrs).transpose(1, 2).flatten(2)


def lightning_index(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    key_mask: Tensor | None = None,
    past_k: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    heads: int,
    top_k: int,
    causal: bool = False,
) -> Tensors:
    q, k, at = q.unflatten(-1, (heads, -1)).transpose(1, 2), k[:, None], torch.arange(q.shape[1])[None]
    if past_k is not None and positions is not None:
        at, k = positions, indexing.scatter_rows(past_k, k, positions, 2)
    elif past_k is not None:
        at, k = at + past_k.shape[2], torch.cat([past_k, k], 2)
    seen = torch.arange(k.shape[2]) <= at[:, None, :, None] if causal else None
    if key_mask is not None:
        shown = F.pad(key_mask != 0, (0, k.shape[2] - key_mask.shape[1]))[:, None, None]
        seen = shown if seen is None else seen & shown
    bias = softmax_attention.lightning_index(q, k, weights, top_k, seen)
    return (bias,) if past_k is None else (bias, k)


def head_linear(x: Tensor, weight: Tensor, *, heads: int, inverse: bool = False) -> Tensor:
    part = products.head_linear_inverse if inverse else products.head_linear
    return part(x, weight, heads)


CALLS: dict[str, Callable[..., Tensor | Tensors]] = {
    "route": route,
    "limit_capacity": _capped(routing.limit_capacity),
    "expert_choice": _capped(routing.expert_choice),
    "load_balance_loss": routing.load_balance_loss,
    "moe": moe,
    "gated_linear_attention": gated_linear_attention,
    "gated_delta_rule": gated_delta_rule,
    "linear_attention": linear_attention,
    "causal_conv": causal_conv,
    "selective_scan": state_space.selective_scan,
    "ssd": ssd,
    "relative_position_bias": relative_position_bias,
    "alibi": alibi,
    "relative_attention": relative_attention,
    "block_sparse_attention": block_sparse_attention,
    "lightning_index": lightning_index,
    "head_linear": head_linear,
    "gather_rows": indexing.gather_rows,
    "scatter_rows": lambda x, rows, indices, axis=1: indexing.scatter_rows(x, rows, indices, axis),
    "top_k": indexing.top_k,
    "softmax": lambda x, axis=-1: indexing.softmax_or_zeros(x, axis),
}


def outputs(op: Op, case: Case, operands: list[Tensor | None]) -> Tensors:
    """Return all outputs that the functions of the library compute for `op`."""
    made = CALLS[op.name](*operands, **case.attrs)
    return made if isinstance(made, tuple) else (made,)


def examples(*names: str) -> list[Any]:
    """Return the example cases of the ops `names` in every dtype, as parameters of a test."""
    return [
        pytest.param(lookup(name), example, dtype, id=f"{name}-{i}-{str(dtype)[6:]}")
        for name in names
        for i, example in enumerate(lookup(name).cases)
        for dtype in DTYPES
    ]


def check(op: Op, example: Case, dtype: torch.dtype) -> None:
    """Check the outputs for a case in `dtype` against the reference in float64."""
    operands = drawn(example, dtype)
    got = outputs(op, example, operands)
    want = reference(op, operands, **example.attrs)
    for y, expected in zip(got, want, strict=False):  # the library returns a state also where the op has none
        if y.is_floating_point():
            assert y.dtype == dtype
            assert_close(y, expected, ROUNDINGS.get(op.name, 1), TERMS)
        else:
            np.testing.assert_array_equal(y.numpy(), expected)

"""Attention helpers for kernels: base-2 scores and the running softmax; and softmax attention in plain torch.

Kernels compute the softmax with exp2, which the hardware has, so scores are multiplied by log2(e): base-2 scores.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from .launch import capability, jit, tl
from .operands import requires_grad

HOPPER = 227 * 1024  # bytes of shared memory that a program may have there


@jit
def to_base2(score):
    """Convert a score from base e to base 2: multiply it by log2(e), in fp32."""
    return score.to(tl.float32) * 1.4426950408889634


@jit
def scale_scores(product, scale, SOFTCAP: tl.constexpr):
    """Return scores in base 2, of products q·k: s = scale · product, or SOFTCAP · tanh(s / SOFTCAP) if SOFTCAP > 0."""
    if SOFTCAP > 0:
        tanh = 1 - 2 / (1 + tl.exp2(to_base2(product) * (2 * scale / SOFTCAP)))
        return to_base2(tanh) * SOFTCAP
    return product * (scale * 1.4426950408889634)


@jit
def update_softmax(m, total, acc, score, value):
    """Return the running softmax (m, total, acc) of rows of queries after one more block of keys. m [rows] is the
    maximum score, `total` [rows] the sum of weights, acc [rows, dv] the weighted sum of values. `score` [rows, keys] is
    in base 2, −∞ for masked keys; `value` is [keys, dv]."""
    higher = tl.maximum(m, tl.max(score, 1))
    base = tl.where(higher == -float("inf"), 0.0, higher)  # rows that have seen nothing
    weight = tl.exp2(score - base[:, None])
    old = tl.exp2(m - base)
    acc = tl.dot(weight.to(value.dtype), value, acc * old[:, None], input_precision="tf32x3")
    return higher, total * old + tl.sum(weight, 1), acc


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float | None,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(scale · q kᵀ + bias) v over the keys where `seen` is true (None: all keys).

    q [batch, heads, seq, d], k [batch, kv_heads, keys, d], v [batch, kv_heads, keys, dv] → [batch, heads, seq, dv] in
    the dtype of q, computed in at least f32, with gradients; query head h reads KV head ⌊h·kv_heads/heads⌋. `seen` bool
    and `bias` broadcast to [batch, heads, seq, keys]. `scale` None is 1/√d; `softcap` caps scores before the bias;
    `sinks` [heads] are scores of one more key per head, whose value is 0. A query without visible keys yields 0.
    """
    plain = softcap is None and sinks is None and bias is None
    is_step = q.shape[2] == 1 and (seen is None or seen.shape[1] == 1)
    if plain and is_step and q.device.type == "cpu" and not requires_grad(q, k, v):
        rows = q.view(q.shape[0], k.shape[1], -1, q.shape[3])  # the heads of a group are queries of one head
        y = F.scaled_dot_product_attention(rows, k, v, attn_mask=seen, scale=scale)
        return y.reshape(*q.shape[:3], -1)
    if seen is None:
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bngsd,bntd->bngst", grouped, k.to(wide)).flatten(1, 2)
    scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    # Not −∞: the softmax of a row without visible keys would be NaN, and so would its gradients.
    scores = scores.masked_fill(~seen, torch.finfo(wide).min)
    if sinks is not None:
        sink = sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[2]].masked_fill(~seen, 0)
    mixed = torch.einsum("bngst,bntd->bngsd", weights.unflatten(1, (k.shape[1], -1)), v.to(wide))
    return mixed.flatten(1, 2).to(q.dtype)


def check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dims: int, axes: str, coded: bool = False) -> None:
    """Check that q, of rank `dims` with axes [batch, heads, …, d], fits k [batch, kv_heads, keys, d] and v [batch,
    kv_heads, keys, dv]. Unless `coded`, dtypes must be equal. Else raise ValueError that shows the expected `axes`."""
    alike = q.dim() == dims and k.dim() == 4 and k.shape[:3] == v.shape[:3]
    if not alike or (q.shape[0], q.shape[-1]) != k.shape[::3]:
        raise ValueError(f"q {[*q.shape]}, k {[*k.shape]} and v {[*v.shape]} are not {axes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} KV heads")
    if not coded and not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q {q.dtype}, k {k.dtype} and v {v.dtype} differ in dtype")


def shared_memory(x: torch.Tensor) -> int:
    """Return the bytes of shared memory that a program may use on the device of x, on a CPU as on Hopper (CUDA C++
    Programming Guide, table of compute capabilities)."""
    version = capability(x.get_device()) if x.is_cuda else (9, 0)
    if version[0] in (9, 10):
        return HOPPER
    return 163 * 1024 if version in ((8, 0), (8, 7)) else 99 * 1024

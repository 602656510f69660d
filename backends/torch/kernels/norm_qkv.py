"""Norm, QKV projection, RoPE and KV cache write of up to 64 tokens in one kernel.

A block owns pairs of elements that RoPE rotates together. With QK-norm (arXiv 2302.05442), the blocks of a head store
their products, and the last of them norms, rotates and stores the head.
"""

from __future__ import annotations

from typing import Any

import torch

from .prefill.norm_rope_cache import check_operands, head_constants, heads_refusal, norm_rope_cache
from .shared import gemv, launch
from .shared.float8 import FLOAT8
from .shared.gemv import Tile, Weight, check, choose_tile, load_first_weights, norm_product, weight_operands
from .shared.heads import norm_pairs, store_head
from .shared.launch import jit, start_next, tl, triton, uses_torch, wait_for_previous
from .shared.norm import NO_NORM, Norm
from .shared.rotary import angles, pair_element
from .shared.small_batch_linear import linear
from .shared.tickets import is_last, zero_counters


@jit
def store_normed_head(
    raw, q_gain, k_gain, head_eps, cos, sin, q, k_cache, v_cache, k_scale, v_scale, positions, m, head, M, seq, heads,
    kv_heads, capacity, keep, stride_b, stride_h, stride_t,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, ROLLING: tl.constexpr,
):  # fmt: skip
    """Norm the elements of `head` (a query or key head) in `raw` [M, heads + kv_heads, HEAD_DIM] by the RMS norm per
    head, rotate the pairs, and store them in q or the cache."""
    pair = tl.arange(0, HALF)[None, :]
    there = (m < M) & (pair < HEAD_DIM // 2)
    at = raw + (m * (heads + kv_heads) + head) * HEAD_DIM
    first, second = pair_element(pair, 0, ROTARY, INTERLEAVED), pair_element(pair, 1, ROTARY, INTERLEAVED)
    a = tl.load(at + first, mask=there, other=0.0, cache_modifier=".cg")
    b = tl.load(at + second, mask=there, other=0.0, cache_modifier=".cg")
    a, b = norm_pairs(a, b, first, second, pair, q_gain, k_gain, head, heads, head_eps, HEAD_DIM)
    c, s = angles(cos, sin, m, pair, M, True, ROTARY) if ROTARY > 0 else (1.0, 0.0)
    store_head(a, b, c, s, q, k_cache, v_cache, k_scale, v_scale, positions, m, pair, head, M, seq, heads, kv_heads,
               capacity, keep, stride_b, stride_h, stride_t, HEAD_DIM, ROTARY, INTERLEAVED, ROLLING)  # fmt: skip


@jit
def norm_qkv_kernel(
    x, weight, scales, offsets, gain, shift, bias, q_gain, k_gain, cos, sin, positions, q, k_cache, v_cache, k_scale,
    v_scale, raw, tickets, M, K, seq, heads, kv_heads, capacity, keep, stride_b, stride_h, stride_t, eps, head_eps,
    NORM: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROLLING: tl.constexpr, HEAD_NORM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N / 2 pairs of a head for all M tokens, and store them (see `store_head`); with HEAD_NORM the last
    program of a query or key head norms and stores them. Grid [heads of queries, keys, values; blocks of pairs]."""
    start_next(PDL)
    PAIRS: tl.constexpr = BLOCK_N // 2
    head, begin = tl.program_id(0), tl.program_id(1) * PAIRS
    halves = tl.arange(0, BLOCK_N)
    owned = tl.minimum(begin + halves % PAIRS, HEAD_DIM // 2 - 1)
    rows = head * HEAD_DIM + pair_element(owned, halves // PAIRS, ROTARY, INTERLEAVED)
    first = load_first_weights(weight, rows, K, 0, K, BLOCK_K, STAGES, BITS, PDL)
    wait_for_previous(PDL)
    m, pair = tl.arange(0, BLOCK_M)[:, None], begin + tl.arange(0, PAIRS)[None, :]
    is_value = head >= heads + kv_heads
    c, s = angles(cos, sin, m, pair, M, not is_value, ROTARY) if ROTARY > 0 else (1.0, 0.0)
    out = norm_product(
        first, x, K, weight, scales, offsets, gain, shift, rows, M, (heads + 2 * kv_heads) * HEAD_DIM, K, 0, K, eps,
        NORM, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR, STAGES, BITS, GROUP, EVEN,
    )  # fmt: skip
    if bias is not None:
        out += tl.load(bias + rows).to(tl.float32)[None, :]
    a, b = tl.split(tl.permute(tl.reshape(out, [BLOCK_M, 2, PAIRS]), [0, 2, 1]))
    if not HEAD_NORM or is_value:
        store_head(a, b, c, s, q, k_cache, v_cache, k_scale, v_scale, positions, m, pair, head, M, seq, heads, kv_heads,
                   capacity, keep, stride_b, stride_h, stride_t, HEAD_DIM, ROTARY, INTERLEAVED, ROLLING)  # fmt: skip
    else:
        there = (m < M) & (pair < HEAD_DIM // 2)
        at = raw + (m * (heads + kv_heads) + head) * HEAD_DIM
        tl.store(at + pair_element(pair, 0, ROTARY, INTERLEAVED), a, mask=there)
        tl.store(at + pair_element(pair, 1, ROTARY, INTERLEAVED), b, mask=there)
        if is_last(tickets + head, tl.num_programs(1)):
            store_normed_head(
                raw, q_gain, k_gain, head_eps, cos, sin, q, k_cache, v_cache, k_scale, v_scale, positions, m, head, M,
                seq, heads, kv_heads, capacity, keep, stride_b, stride_h, stride_t,
                HEAD_DIM, HALF, ROTARY, INTERLEAVED, ROLLING,
            )  # fmt: skip


def refusal(
    x: torch.Tensor,
    weight: Weight,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm = NO_NORM,
    q_norm: Norm = NO_NORM,
    k_norm: Norm = NO_NORM,
) -> str | None:
    """Return the reason why the kernel cannot take these operands, in a few words; None if it can."""
    if reason := heads_refusal(k_cache, v_cache, q_norm, k_norm):
        return reason
    reason = gemv.refusal(x, weight, bias, norm.gain, norm.shift, q_norm.gain, k_norm.gain)
    return reason or launch.refusal(x, k_cache.dtype == torch.uint8)


def norm_qkv(
    x: torch.Tensor,
    weight: Weight,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm = NO_NORM,
    q_norm: Norm = NO_NORM,
    k_norm: Norm = NO_NORM,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    rolling: bool = False,
    keep_first: int = 0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    kernel: bool | None = None,
) -> torch.Tensor:
    """Return RoPE(q_norm(q)); write RoPE(k_norm(k)) and v into the caches, where [q, k, v] = norm(x) Wᵀ + b.

    x [batch, in] or [batch, seq, in], weight [(heads + 2·kv_heads)·d, in] and bias with the heads of queries first,
    then of keys, then of values; caches [batch, kv_heads, capacity, d], positions i64 [batch] or [batch, seq] → q
    [batch, heads, d] or [batch, seq, heads, d]. cos, sin f32 [batch·seq, pairs] of the tokens' angles rotate the first
    2·pairs elements of a head: element i with i + pairs, or 2i with 2i + 1 if `interleaved`; None: no rotation.
    Position p is written to slot p; in a `rolling` cache, which takes one token at a time, to slot p if p < keep_first,
    else to keep_first + (p − keep_first) modulo (capacity − keep_first). Tokens whose slot is outside the cache are not
    written. With `k_scale` and `v_scale` f32 [kv_heads] the caches are u8 bytes of FP8 (e4m3): keys and values are
    divided by their scales and rounded. `tickets`: counters, see `linear_residual`; heads + kv_heads suffice. `kernel`
    is as in `uses_torch`. For more than 64 tokens, torch computes the products, and `norm_rope_cache` norms, rotates
    and writes. Raise ValueError if shapes do not fit, or a norm is unknown.
    """
    check(x, weight, norm, bias)
    head_dim, kv_heads = k_cache.shape[3], k_cache.shape[1]
    heads = len(weight) // head_dim - 2 * kv_heads
    if len(weight) % head_dim or heads < 1:
        caches = f"{[*k_cache.shape]} and {[*v_cache.shape]}"
        raise ValueError(f"weight {[*weight.shape]} does not fit caches {caches} [batch, kv_heads, capacity, d]")
    if x.ndim not in (2, 3) or positions.numel() * x.shape[-1] != x.numel():
        raise ValueError(f"x {[*x.shape]} and positions {[*positions.shape]} must be of the same tokens")
    rows = positions.numel()
    check_operands(rows, k_cache, v_cache, q_norm, k_norm, cos, sin, k_scale, v_scale, rolling)
    norms = {"norm": norm, "q_norm": q_norm, "k_norm": k_norm}
    shape = (*x.shape[:-1], heads, head_dim)
    if uses_torch(kernel, refusal, x, weight, k_cache, v_cache, bias, **norms):
        projected = linear(norm(x.reshape(rows, -1)), weight, bias)
        how: dict[str, Any] = {"cos": cos, "sin": sin, "interleaved": interleaved, "k_scale": k_scale}
        how |= {"v_scale": v_scale, "rolling": rolling, "keep_first": keep_first, "kernel": kernel}
        return norm_rope_cache(projected, k_cache, v_cache, positions, q_norm, k_norm, **how).view(shape)
    batch, capacity = len(k_cache), k_cache.shape[2]
    plan, normed = _tile(rows, weight, x.shape[-1], head_dim, x.dtype), q_norm.kind != "none"
    raw = x.new_empty(rows, heads + kv_heads, head_dim, dtype=torch.float32) if normed else None
    q = x.new_empty(shape)
    if k_scale is not None:
        k_cache, v_cache = k_cache.view(FLOAT8), v_cache.view(FLOAT8)
    norm_qkv_kernel[(heads + 2 * kv_heads, triton.cdiv(head_dim, plan.rows))](
        x.reshape(rows, -1).contiguous(), *weight_operands(weight), norm.gain, norm.shift, bias, q_norm.gain,
        k_norm.gain, cos, sin, positions.contiguous(), q, k_cache, v_cache, k_scale, v_scale, raw,
        zero_counters(x, heads + kv_heads) if normed and tickets is None else tickets,
        rows, x.shape[-1], rows // batch, heads, kv_heads, capacity, keep_first, *k_cache.stride()[:3], norm.eps,
        q_norm.eps, NORM=norm.kind, **head_constants(head_dim, 0 if cos is None else 2 * cos.shape[1]),
        INTERLEAVED=interleaved, ROLLING=rolling, HEAD_NORM=normed, **plan.options(x),
    )  # fmt: skip
    return q


def _tile(batch: int, weight: Weight | int, inputs: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile for `batch` tokens. Its rows of W are from one head, and include both elements of each pair.
    `weight` is W, or the number of its rows."""
    outputs, tensor = (weight, None) if isinstance(weight, int) else (len(weight), weight)
    return choose_tile(batch, outputs, inputs, dtype, 2, tensor).within(head_dim)

"""QK-norm, RoPE and KV cache write for the QKV projections of many tokens, in one pass.

QK-norm: arXiv 2302.05442; RoPE: arXiv 2104.09864.
"""

from __future__ import annotations

import torch

from ..shared import launch
from ..shared.cached_keys import write_cache
from ..shared.float8 import FLOAT8, as_bytes, check_scales
from ..shared.heads import norm_pairs, store_head
from ..shared.launch import DTYPES, jit, start_next, tl, triton, uses_torch, wait_for_previous
from ..shared.norm import NO_NORM, Norm
from ..shared.operands import gradient_refusal, power_of_2
from ..shared.rotary import angles, pair_element, rotate_heads

NUMBERS = 2048  # of a program


@jit
def norm_rope_cache_kernel(
    projected, q_gain, k_gain, cos, sin, positions, q, k_cache, v_cache, k_scale, v_scale,
    M, width, seq, heads, kv_heads, capacity, keep, stride_b, stride_h, stride_t, head_eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROLLING: tl.constexpr, HEAD_NORM: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store one head of ROWS tokens. Grid [blocks of ROWS tokens, heads]; the second axis counts query
    heads first, then key heads, then value heads."""
    start_next(PDL)
    wait_for_previous(PDL)
    head = tl.program_id(1)
    m = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    there = (m < M) & (pair < HEAD_DIM // 2)
    first, second = pair_element(pair, 0, ROTARY, INTERLEAVED), pair_element(pair, 1, ROTARY, INTERLEAVED)
    at = projected + m * width + head * HEAD_DIM
    a = tl.load(at + first, mask=there, other=0.0).to(tl.float32)
    b = tl.load(at + second, mask=there, other=0.0).to(tl.float32)
    is_value = head >= heads + kv_heads
    if HEAD_NORM and not is_value:
        a, b = norm_pairs(a, b, first, second, pair, q_gain, k_gain, head, heads, head_eps, HEAD_DIM)
    c, s = angles(cos, sin, m, pair, M, not is_value, ROTARY) if ROTARY > 0 else (1.0, 0.0)
    store_head(a, b, c, s, q, k_cache, v_cache, k_scale, v_scale, positions, m, pair, head, M, seq, heads, kv_heads,
               capacity, keep, stride_b, stride_h, stride_t, HEAD_DIM, ROTARY, INTERLEAVED, ROLLING)  # fmt: skip


def check_operands(
    rows: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm: Norm = NO_NORM,
    k_norm: Norm = NO_NORM,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    rolling: bool = False,
) -> None:
    """Raise ValueError unless caches, FP8 scales, norms of heads, and cos and sin fit `rows` tokens: an equal number
    for each batch row of the caches, and exactly one if they are `rolling`."""
    batch, _, _, head_dim = k_cache.shape
    if k_cache.shape != v_cache.shape:
        raise ValueError(f"caches {[*k_cache.shape]} and {[*v_cache.shape]} [batch, kv_heads, capacity, d] differ")
    if rows % batch or (rolling and rows != batch):
        expected = "the same number of tokens" if not rolling else "one token, as rolling caches take them,"
        raise ValueError(f"{rows} tokens are not {expected} for each of the {batch} rows of the caches")
    check_scales(k_cache, v_cache, k_scale, v_scale)
    q_norm.check(head_dim)
    k_norm.check(head_dim)
    tables = [None if table is None else [*table.shape] for table in (cos, sin)]
    if tables[0] != tables[1] or (cos is not None and (len(cos) != rows or 2 * cos.shape[-1] > head_dim)):
        raise ValueError(f"cos {tables[0]} and sin {tables[1]} must both be [{rows}, n], n ≤ {head_dim // 2}")


def refusal(
    projected: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm: Norm = NO_NORM,
    k_norm: Norm = NO_NORM,
) -> str | None:
    """Return the reason why the kernel cannot take these operands, in a few words; None if it can."""
    if reason := launch.refusal(projected, k_cache.dtype == torch.uint8, projected.dtype):
        return reason
    if not projected.is_contiguous():
        return "the projections are not contiguous"
    return heads_refusal(k_cache, v_cache, q_norm, k_norm) or gradient_refusal(projected)


def heads_refusal(k_cache: torch.Tensor, v_cache: torch.Tensor, q_norm: Norm, k_norm: Norm) -> str | None:
    """Return the reason why kernels cannot norm heads by these norms or store them in these caches; else None."""
    if k_cache.shape[3] % 2:
        return "an odd number of elements per head"
    if (q_norm.kind, q_norm.eps) != (k_norm.kind, k_norm.eps) or q_norm.kind == "layer":
        return "the norms of heads are not RMS norms with the same settings for queries and keys"
    if (q_norm.gain is None) != (k_norm.gain is None):
        return "the norm of queries has a gain and that of keys has none, or the reverse"
    if k_cache.dtype not in (*DTYPES, torch.uint8) or k_cache.dtype != v_cache.dtype:
        return f"caches are {k_cache.dtype} and {v_cache.dtype}"
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        return "the caches differ in strides, or the last axis is not contiguous"
    return None


def norm_rope_cache(
    projected: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    q_norm: Norm = NO_NORM,
    k_norm: Norm = NO_NORM,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    rolling: bool = False,
    keep_first: int = 0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kernel: bool | None = None,
) -> torch.Tensor:
    """Return RoPE(q_norm(q)); write RoPE(k_norm(k)) and v into the caches, for `projected` = [q, k, v]. `projected` is
    [batch·seq, (heads + 2·kv_heads)·d], the tokens of each batch row of the caches consecutive; positions i64 has one
    position per token → q [batch·seq, heads, d]. Caches, norms and keywords are as in `norm_qkv`. `kernel` is as in
    `uses_torch`. Raise ValueError if shapes do not fit, or a norm is unknown."""
    rows, (batch, kv_heads, capacity, head_dim) = len(projected), k_cache.shape
    check_operands(rows, k_cache, v_cache, q_norm, k_norm, cos, sin, k_scale, v_scale, rolling)
    heads = projected.shape[1] // head_dim - 2 * kv_heads
    if uses_torch(kernel, refusal, projected, k_cache, v_cache, q_norm, k_norm):
        q_and_k, v = projected.view(rows, -1, head_dim).split_with_sizes([heads + kv_heads, kv_heads], 1)
        if q_norm.kind != "none" or k_norm.kind != "none":
            q_and_k = torch.cat([q_norm(q_and_k[:, :heads]), k_norm(q_and_k[:, heads:])], 1)
        if cos is not None and sin is not None:
            q_and_k = rotate_heads(q_and_k, cos, sin, interleaved)
        for cache, new, scale in ((k_cache, q_and_k[:, heads:], k_scale), (v_cache, v, v_scale)):
            stored = new if scale is None else as_bytes(new[:, :, None], scale)[:, :, 0]
            write_cache(cache, stored, positions, rolling, keep_first)
        queries: torch.Tensor = q_and_k[:, :heads]
        return queries
    q = projected.new_empty(rows, heads, head_dim)
    if k_scale is not None:
        k_cache, v_cache = k_cache.view(FLOAT8), v_cache.view(FLOAT8)
    block = _rows(head_dim)
    norm_rope_cache_kernel[(triton.cdiv(rows, block), heads + 2 * kv_heads)](
        projected, q_norm.gain, k_norm.gain, cos, sin, positions.contiguous(), q, k_cache, v_cache, k_scale, v_scale,
        rows, projected.shape[1], rows // batch, heads, kv_heads, capacity, keep_first, *k_cache.stride()[:3],
        q_norm.eps, **head_constants(head_dim, 0 if cos is None else 2 * cos.shape[1]), INTERLEAVED=interleaved,
        ROLLING=rolling, HEAD_NORM=q_norm.kind != "none", ROWS=block, **launch.options(projected, 4, 1),
    )  # fmt: skip
    return q


def head_constants(head_dim: int, rotary: int) -> dict[str, int]:
    """Return the constexpr arguments HEAD_DIM, HALF and ROTARY of heads whose first `rotary` elements are rotated."""
    return {"HEAD_DIM": head_dim, "HALF": power_of_2(head_dim // 2), "ROTARY": rotary}


def _rows(head_dim: int) -> int:
    return max(1, NUMBERS // power_of_2(head_dim))

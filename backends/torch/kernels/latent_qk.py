"""Latent attention, one token per row: absorbed queries and the cache write (DeepSeek-V2, arXiv 2405.04434).

A head's query has a plain part, which is multiplied by the keys' up-projection so that it scores latents directly, and
a part that RoPE rotates. The token's latent is normed, the rotary part of its key is rotated, and both are written to
the cache that `latent_decode` reads. A block multiplies some columns of the up-projection of a head by the plain part
of the head's query; one more block writes the token's cache row.
"""

from __future__ import annotations

import torch

from .shared import gemv
from .shared.cached_keys import own_slot, write_cache
from .shared.gemv import flatten_rows
from .shared.launch import DTYPES, jit, options, start_next, tl, triton, uses_torch, wait_for_previous
from .shared.norm import NO_NORM, Norm
from .shared.operands import power_of_2
from .shared.rotary import pair_element, rotate_heads

NUMBERS = 8192  # of the up-projection that a block of 16-bit weights takes, half as many of fp32
WARPS = 4


@jit
def store_rotated(source, target, m, pair, cos, sin, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load the ROPE elements at `source`, rotate them by the angles of row m of `cos` and `sin` [rows, ROPE / 2], and
    store them at `target`. `pair` [n] are the indices of the pairs."""
    there = pair < ROPE // 2
    first, second = pair_element(pair, 0, ROPE, INTERLEAVED), pair_element(pair, 1, ROPE, INTERLEAVED)
    c = tl.load(cos + m * (ROPE // 2) + pair, mask=there, other=1.0)
    s = tl.load(sin + m * (ROPE // 2) + pair, mask=there, other=0.0)
    a = tl.load(source + first, mask=there, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=there, other=0.0).to(tl.float32)
    tl.store(target + first, (a * c - b * s).to(target.dtype.element_ty), mask=there)
    tl.store(target + second, (b * c + a * s).to(target.dtype.element_ty), mask=there)


@jit
def latent_qk_kernel(
    q, latent, weight, gain, cos, sin, positions, out, cache, M, q_row, latent_row, cache_row, capacity, keep, eps,
    RANK: tl.constexpr, PLAIN: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROLLING: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Store the absorbed and rotated queries of all M tokens, and write their cache rows. Grid [blocks of BLOCK_R
    columns, heads + 1]: a program with a head index below `heads` absorbs that head into BLOCK_R columns; with head
    index `heads`, only block 0 has work: it writes the cache."""
    start_next(PDL)
    head, heads = tl.program_id(1), tl.num_programs(1) - 1
    block, pair = tl.program_id(0), tl.arange(0, BLOCK_P)
    if head < heads:
        o, i = tl.arange(0, BLOCK_O), block * BLOCK_R + tl.arange(0, BLOCK_R)
        at = weight + (head.to(tl.int64) * PLAIN + o)[:, None] * RANK + i[None, :]
        inside = (o < PLAIN)[:, None] & (i < RANK)[None, :]
        w = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
        wait_for_previous(PDL)
        for m in range(M):
            source = q + m * q_row + head * (PLAIN + ROPE)
            target = out + (m * heads + head) * (RANK + ROPE)
            x = tl.load(source + o, mask=o < PLAIN, other=0.0).to(tl.float32)
            y = tl.sum(w.to(tl.float32) * x[:, None], axis=0)
            tl.store(target + i, y.to(out.dtype.element_ty), mask=i < RANK)
            if block == 0:
                store_rotated(source + PLAIN, target + RANK, m, pair, cos, sin, ROPE, INTERLEAVED)
    else:
        wait_for_previous(PDL)
        if block == 0:
            i = tl.arange(0, BLOCK_I)
            for m in range(M):
                slot = own_slot(tl.load(positions + m), capacity, keep, ROLLING)
                if (slot >= 0) & (slot < capacity):
                    source = latent + m * latent_row
                    target = cache + tl.cast(m, tl.int64) * cache_row + slot * (RANK + ROPE)
                    v = tl.load(source + i, mask=i < RANK, other=0.0).to(tl.float32)
                    if NORM == "rms":
                        v *= tl.rsqrt(tl.sum(v * v, axis=0) / RANK + eps)
                    if gain is not None:
                        v *= tl.load(gain + i, mask=i < RANK, other=0.0).to(tl.float32)
                    tl.store(target + i, v.to(cache.dtype.element_ty), mask=i < RANK)
                    store_rotated(source + RANK, target + RANK, m, pair, cos, sin, ROPE, INTERLEAVED)


def refusal(rank: int, plain: int, rope: int, dtype: torch.dtype) -> str | None:
    """Return the reason why the kernel does not support these sizes of latents and heads; None if it does."""
    if dtype not in DTYPES:
        return f"no kernel for {dtype}"
    if rank > 8192 or plain > 1024 or rope > 1024:
        return f"rank {rank}, or heads of {plain} and {rope} features, exceed 8192, 1024 and 1024"
    return None


def latent_qk(
    q: torch.Tensor,
    latent: torch.Tensor,
    weight: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    norm: Norm = NO_NORM,
    interleaved: bool = False,
    rolling: bool = False,
    keep_first: int = 0,
    kernel: bool | None = None,
) -> torch.Tensor:
    """Return [Wᵀ q_plain, RoPE(q_rope)] for one token per batch row; write [norm(c), RoPE(k_rope)] into the cache.

    q [batch, heads·(plain + rope)] or [batch, 1, ·], latent = [c, k_rope] [batch, rank + rope] or [batch, 1, ·]; both
    may be slices of a projection. weight [heads·plain, rank] is the keys' up-projection; cache [batch, 1, capacity,
    rank + rope], positions i64 [batch] or [batch, 1] → queries [batch, heads, rank + rope] for `latent_decode`. cos,
    sin f32 [batch, rope/2] are cosines and sines of the RoPE angles. `interleaved`, `rolling`, `keep_first` and the
    slot of a position are as in `norm_qkv`. `kernel` is as in `uses_torch`. Raise ValueError if shapes do not fit,
    cache rows are not contiguous, or the norm is neither RMS nor "none".
    """
    batch, _, capacity, width = cache.shape
    rank, rope = weight.shape[1], 2 * cos.shape[-1]
    if cos.shape != sin.shape or len(cos) != batch or rank + rope != width or cache.shape[1] != 1:
        raise ValueError(f"weight {[*weight.shape]} and cos {[*cos.shape]} do not fit a cache {[*cache.shape]}")
    if cache.stride()[2:] != (width, 1):
        raise ValueError(f"cache rows must be contiguous, but the strides are {cache.stride()}")
    heads = (q.shape[-1] - len(weight)) // rope  # a query has `rope` numbers beside those that weight has rows for
    if heads < 1 or len(weight) % heads or q.shape[-1] != len(weight) + heads * rope:
        raise ValueError(f"q {[*q.shape]} do not match {rope} rotated features and weight {[*weight.shape]}")
    if (q.numel(), latent.numel(), positions.numel()) != (batch * q.shape[-1], batch * width, batch):
        raise ValueError(f"q {[*q.shape]} and latent {[*latent.shape]} must have one token for each of {batch} rows")
    norm.check(rank)
    if norm.kind == "layer":
        raise ValueError("the kernel norms latents by RMS norm only")
    plain = len(weight) // heads

    def find_reason() -> str | None:
        alike = q.dtype == latent.dtype == cache.dtype
        reason = gemv.refusal(q, weight, norm.gain) or refusal(rank, plain, rope, q.dtype)
        return reason or (None if alike else "queries, latents and the cache differ in dtype")

    if uses_torch(kernel, find_reason):
        plain_part, rotary = q.reshape(batch, heads, -1).split([plain, rope], -1)
        absorbed = torch.einsum("bho,hoi->bhi", plain_part, weight.unflatten(0, (heads, -1)))
        queries = torch.cat([absorbed, rotate_heads(rotary, cos, sin, interleaved)], -1)
        compressed, shared = latent.reshape(batch, 1, -1).split([rank, rope], -1)
        row = torch.cat([norm(compressed), rotate_heads(shared, cos, sin, interleaved)], -1)
        write_cache(cache, row, positions, rolling, keep_first)
        return queries
    q, latent = flatten_rows(q), flatten_rows(latent)
    out = q.new_empty(batch, heads, rank + rope)
    sizes = _sizes(rank, plain, rope, q.element_size())
    latent_qk_kernel[(triton.cdiv(rank, sizes["BLOCK_R"]), heads + 1)](
        q, latent, weight, norm.gain, cos, sin, positions.contiguous(), out, cache,
        batch, q.stride(0), latent.stride(0), cache.stride(0), capacity, keep_first, norm.eps,
        NORM=norm.kind, INTERLEAVED=interleaved, ROLLING=rolling, **sizes, **options(q, WARPS, 1),
    )  # fmt: skip
    return out


def _sizes(rank: int, plain: int, rope: int, size: int) -> dict[str, int]:
    columns, rank_block = max(16, 2 * NUMBERS // size // power_of_2(plain)), power_of_2(rank)
    sizes = {"RANK": rank, "PLAIN": plain, "ROPE": rope, "BLOCK_I": rank_block, "BLOCK_R": min(columns, rank_block)}
    return sizes | {"BLOCK_O": power_of_2(plain), "BLOCK_P": power_of_2(rope // 2)}

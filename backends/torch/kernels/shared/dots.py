"""Skinny GEMMs norm(x) Wᵀ for 4 to 64 rows of x on tensor cores, with W read once.

A tensor core multiplies 64 (or 16) rows of W by 8 or more rows of x. So rows of W are the M side of the MMA and the few
rows of x the N side, and few products are wasted on padding. Tiles of W and x are copied to shared memory `STAGES` − 1
steps ahead of the products. The copies cannot start before the preceding kernel has written x, so until then the
weights are prefetched into L2.

An RMS norm is a factor per row of x, which divides the sums (FlashNorm, arXiv 2407.09577); its gain is multiplied into
x, which is then rounded to its dtype, as after a separate norm. An f32 product is three tf32 products.
"""

from __future__ import annotations

from .launch import INTERPRETER, jit, tl


@jit
def prefetch_rows(weight, rows, K, begin, end, BLOCK_K: tl.constexpr):
    """Prefetch columns `begin` to min(`begin` + BLOCK_K, `end`) of `rows` [n] of W [·, K] into L2."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = BLOCK_K // LINE if BLOCK_K > LINE else 1
    column = tl.minimum(begin + tl.arange(0, LINES) * LINE, end - 1)
    at = (weight + rows.to(tl.int64)[:, None] * K + column[None, :]).to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], tl.int32, is_pure=False, pack=1)


@jit
def dot_operand(x):
    """Return x as an operand of `tl.dot`: cast to fp32 in the interpreter, whose `tl.dot` needs 32-bit floats."""
    if INTERPRETER:
        return x.to(tl.float32)
    return x


@jit
def row_moments(x, k, K, eps, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return mean and 1/√(variance + ε), each [BLOCK_M, 1], of rows of K columns. x: pointers [BLOCK_M, BLOCK_K] to
    the first columns of the rows; k: the indices [1, BLOCK_K] of these columns."""
    total = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        total += tl.load(x + start, mask=k + start < K, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=1)[:, None] / K
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        centred = tl.load(x + start, mask=k + start < K, other=0.0).to(tl.float32) - mean
        squares += tl.where(k + start < K, centred * centred, 0.0)
    return mean, tl.rsqrt(tl.sum(squares, axis=1)[:, None] / K + eps)


@jit
def apply_gain(x, gain, shift, k, there):
    """Return x ⊙ gain + shift of fp32 x [m, n]. Column j of x takes element k[j] of `gain` and of `shift`, each of
    which may be None. `there` [n] masks their loads (None: no mask)."""
    if gain is not None:
        x = x * tl.load(gain + k, mask=there, other=None if there is None else 0.0).to(tl.float32)[None, :]
    if shift is not None:
        x = x + tl.load(shift + k, mask=there, other=None if there is None else 0.0).to(tl.float32)[None, :]
    return x


@jit
def dot_products(
    x, weight, other, gain, shift, K, begin, end, eps,
    NORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return norm(x) Wᵀ and norm(x) Vᵀ, each fp32 [BLOCK_M, BLOCK_N], over columns `begin` to `end` − 1 of the K
    columns. x [BLOCK_M], `weight` and `other` [BLOCK_N] point to the rows of x, W and V. If `other` is None, the second
    product is 0. With a norm, `begin` is 0 and `end` is K."""
    k = begin + tl.arange(0, BLOCK_K)
    from_x, from_weight = x[:, None] + k[None, :], weight[:, None] + k[None, :]
    if other is not None:
        from_other = other[:, None] + k[None, :]
    mean, rstd = row_moments(from_x, k[None, :], K, eps, BLOCK_M, BLOCK_K) if NORM == "layer" else (0.0, 1.0)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    other_sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in tl.range(0, end - begin, BLOCK_K, num_stages=STAGES):
        there = k + start < end
        w = tl.load(from_weight + start, mask=there[None, :], other=0.0, eviction_policy="evict_first")
        if other is not None:
            w_other = tl.load(from_other + start, mask=there[None, :], other=0.0, eviction_policy="evict_first")
        v = tl.load(from_x + start, mask=there[None, :], other=0.0)
        if NORM != "none":
            exact = v.to(tl.float32)
            if NORM == "rms":
                squares += exact * exact
            else:
                exact = (exact - mean) * rstd
            v = apply_gain(exact, gain, shift, k + start, there).to(v.dtype)
        total = tl.dot(dot_operand(w), tl.trans(dot_operand(v)), total, input_precision="tf32x3")
        if other is not None:
            other_sums = tl.dot(dot_operand(w_other), tl.trans(dot_operand(v)), other_sums, input_precision="tf32x3")
    share = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / K + eps) if NORM == "rms" else 1.0
    return tl.trans(total) * share, tl.trans(other_sums) * share

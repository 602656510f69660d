"""Skinny GEMMs norm(x) Wᵀ for up to 64 rows of x, with W read once: up to 3 rows on CUDA cores, more on tensor cores.

At batch 1 a linear layer is limited by reading its weights. So each block owns a few rows of W and streams them with
16-byte loads, several in flight per thread, and multiplies in fp32. An RMS norm divides a row of x by one factor. It
takes no extra pass: the sums are divided instead, after all columns (FlashNorm, arXiv 2407.09577). A layer norm first
reads x, from cache. The first weights are loaded before the kernel that writes x has ended, so a kernel of the same
step must not write the weights.

From 4 rows on, CUDA cores cannot multiply as fast as weights arrive, but tensor cores can: see `dots`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from . import launch
from .dots import dot_products, prefetch_rows
from .float8 import FLOAT4, FLOAT8, SHORT
from .launch import jit, options, tl, wait_for_previous
from .norm import Norm
from .operands import gradient_refusal, power_of_2
from .quantized_gemv import TILE, Codes, as_words, chunk_size, code_products

PROCESSORS = 132  # streaming multiprocessors of an H200
MOST_ROWS = 64  # of x; for more, products are those of a prefill, and libraries compute them
DOT_ROWS = 4  # from so many on tensor cores multiply
STAGED = 108 * 1024  # bytes of shared memory for the tiles of a block: two blocks fit on a multiprocessor
ON_THE_WAY = 40 * 1024  # bytes of weights that a multiprocessor must have asked for, to wait for none: 5 TB/s for 1 µs


@dataclass(frozen=True)
class Tile:
    """The tile of a block.

    - batch, rows: rows of x, and rows of W, that the block multiplies
    - columns, vector: columns per step of its loop, and per load of a thread
    - warps, stages: warps of the block; pipeline depth of its loop on tensor cores, 0 on CUDA cores
    - bits, group: width of W's codes, and codes per scale; 0 if W is not quantized
    - even: `columns` divides the columns of a quantized W; False if W is not quantized
    """

    batch: int
    rows: int
    columns: int
    vector: int
    warps: int
    stages: int = 0
    bits: int = 0
    group: int = 0
    even: bool = False

    @property
    def constants(self) -> dict[str, int]:
        """Return the fields, without `warps`, as the constexpr arguments BLOCK_M, BLOCK_N, BLOCK_K, VECTOR, …, EVEN."""
        shape = {"BLOCK_M": self.batch, "BLOCK_N": self.rows, "BLOCK_K": self.columns, "VECTOR": self.vector}
        return {**shape, "STAGES": self.stages, "BITS": self.bits, "GROUP": self.group, "EVEN": self.even}

    def within(self, outputs: int) -> Tile:
        """Return the tile with at most `outputs` rows of W, a power of 2."""
        return replace(self, rows=min(self.rows, 1 << (outputs.bit_length() - 1)))

    def options(self, x: torch.Tensor) -> dict[str, Any]:
        """Return the keyword arguments of a launch on the device of x: the constants of the tile and launch options.
        `num_stages` is 1: loops on tensor cores set their stages themselves, and on CUDA cores prefetch explicitly."""
        return {**self.constants, **options(x, self.warps, 1)}


Weight = torch.Tensor | Codes


def weight_operands(weight: Weight) -> tuple[Any, Any, Any]:
    """Return the operands that kernels read for `weight`: (values, None, None), or (codes, scales, offsets or None)."""
    return weight.parts if isinstance(weight, Codes) else (weight, None, None)


def choose_tile(
    batch: int, outputs: int, inputs: int, dtype: torch.dtype, least: int = 1, weight: Weight | None = None
) -> Tile:
    """Return the tile for `batch` rows of x in `dtype` and W [outputs, inputs]. The tile is that of `choose_code_tile`
    if `weight` is `Codes`, else that of `_dot_tile` from DOT_ROWS rows of x on, else one for CUDA cores.

    On CUDA cores, up to 4 warps of a block share the columns, fewer if many lanes would idle. A block has 8 or 4 rows
    of W, so that each thread has 64 bytes of weights or more in flight. If that gives a multiprocessor fewer than four
    blocks, a block has fewer rows, but at least `least`, and, for up to two rows of x, more columns.
    """
    vector = 16 // dtype.itemsize
    if isinstance(weight, Codes):
        small = weight.packed.dtype == FLOAT4
        return choose_code_tile(batch, outputs, inputs, weight.bits, weight.group, dtype.itemsize, small)
    if batch >= DOT_ROWS:
        return _dot_tile(power_of_2(batch, 8), outputs, inputs, dtype.itemsize)
    warps = next(w for w in (4, 2, 1) if w == 1 or -inputs % (32 * vector * w) <= inputs // 8)
    rows = next(r for r in (8, 4, 2, 1) if r == least or outputs // r >= (16 if r == 8 else 4) * PROCESSORS)
    rows, wide = (rows, max(1, 4 // rows)) if batch <= 2 else (min(rows, 4), 1)
    columns = 32 * vector * warps
    while wide > 1 and columns < inputs:
        columns, wide = 2 * columns, wide // 2
    return Tile(power_of_2(batch), rows, columns, vector, warps)


def _dot_tile(batch: int, outputs: int, inputs: int, size: int) -> Tile:
    """Return the tile for tensor cores, with a warp for each 16 rows of W. A block has 64 rows of W, or fewer if some
    multiprocessors would get no block, but at least 16 and as many as rows of x, because every block reads all x."""
    least = max(16, min(batch, 64))
    rows = next(r for r in (64, 32, 16) if r == least or outputs // r >= PROCESSORS)
    wide = size < 4 and rows == 16 and batch <= 16
    columns = min({1: 256, 2: 128, 4: 32}[size] * (1 + wide), power_of_2(inputs, 32))
    stages = pipeline_stages(rows * columns * size, batch * columns * size, outputs // rows)
    return Tile(batch, rows, columns, 16 // size, rows // 16, stages)


def choose_code_tile(
    batch: int, outputs: int, inputs: int, bits: int, group: int, size: int = 2, small: bool = False
) -> Tile:
    """Return the tile for W in codes of `bits` (FP4 if `small`) and x with elements of `size` bytes. A warp takes 32
    rows of W. A block has two warps; one, if two would leave multiprocessors without a block; four, for many rows of x,
    because every block reads all x. A step is two chunks; one, if two do not divide the columns, or if registers cannot
    hold the sums of groups.

    For 16 or 32 rows of x a warp takes 64 rows of W if W has enough rows and registers suffice: x and its norm are then
    prepared half as often.
    """
    small_groups = group < 64 and bits == 4  # scales, whose registers one row alone would not leave
    batch, chunk = 1 if batch == 1 and not small_groups else power_of_2(batch, 8), chunk_size(bits)
    wide = batch >= 32 or (batch == 16 and outputs // 128 >= PROCESSORS)
    rows = 128 if wide else 64 if batch == 16 or outputs // 64 >= PROCESSORS else 32
    fits = batch == 16 or (batch == 32 and bits == 4 and size == 2)
    double = fits and not small_groups and outputs // 256 >= PROCESSORS * 3 // 4
    rows = 256 if double else rows
    if small and group == SHORT and batch < 16:  # two warps would spill registers under Triton 3.6
        rows = 32
    step = chunk if batch == 64 or small_groups or double or inputs % (2 * chunk) else 2 * chunk
    if group % TILE and not (small and group == SHORT):
        group = -(-group // step) * step  # of all columns, which may be any number
    stages = pipeline_stages(rows * step * bits // 8, batch * step * 2, outputs // rows)
    return Tile(batch, rows, step, 1, rows // (64 if double else 32), stages, bits, group, inputs % step == 0)


def pipeline_stages(weights: int, others: int, blocks: int) -> int:
    """Return the number of pipeline stages, 2 to 6, of a loop in `blocks` blocks. Each step of the loop loads `weights`
    bytes of W and `others` bytes of x."""
    asked = -(-ON_THE_WAY // (weights * max(1, min(blocks // PROCESSORS, 8)))) + 1
    return max(2, min(6, max(3, asked), STAGED // (weights + others)))


def check(x: torch.Tensor, weight: Weight, norm: Norm, bias: torch.Tensor | None) -> None:
    """Check that the shapes of x [..., in], weight [out, in], norm and bias [out] fit; raise ValueError otherwise."""
    if weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {list(x.shape)} does not fit weight {list(weight.shape)} [out, in]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)} does not fit weight {list(weight.shape)} [out, in]")
    norm.check(x.shape[-1])


def flatten_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., in] as rows [n, in] with stride 1 along a row; a slice of wider rows is not copied."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def has_few_rows(x: torch.Tensor) -> bool | None:
    """Return whether x [..., in] has 1 to MOST_ROWS rows; None in an export with a symbolic number of rows."""
    if torch.compiler.is_exporting() and not isinstance(x.numel(), int):
        return None
    return 0 < x.numel() <= MOST_ROWS * x.shape[-1]


def refusal(x: torch.Tensor, *others: Weight | None) -> str | None:
    """Return the reason why these kernels cannot take x [..., in] and `others`, in a few words; None if they can."""
    if not x.is_cuda and (reason := launch.refusal(x)):  # at once: on a CPU a call of torch takes a microsecond
        return reason
    tensors = [tensor for tensor in others if isinstance(tensor, torch.Tensor)]
    coded = [part for codes in others if isinstance(codes, Codes) for part in codes.parts if part is not None]
    if reason := launch.refusal(x, any(part.dtype == FLOAT8 for part in coded), x.dtype):
        return reason
    if any(tensor.dtype != x.dtype for tensor in tensors):
        return f"an operand differs in dtype from x ({x.dtype})"
    if not has_few_rows(x):
        return f"not 1 to {MOST_ROWS} rows"
    if not all(tensor.is_contiguous() for tensor in (*tensors, *coded)):
        return "an operand is not contiguous"
    return gradient_refusal(x, *tensors, *coded)


@jit
def sum_vectors(x, VECTOR: tl.constexpr):
    """Return the sums of each VECTOR adjacent elements of the last axis: [a, b, c] → [a, b, c / VECTOR]. One thread
    holds all of them: no shuffles."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // VECTOR, VECTOR]), axis=3)


@jit
def moments(x, k, K, eps, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return mean and 1/√(variance + ε), each [BLOCK_M, 1, 1], of rows of K columns. x: pointers [BLOCK_M, 1, BLOCK_K]
    to the first columns of the rows; k: the indices [1, 1, BLOCK_K] of these columns."""
    total = tl.zeros([BLOCK_M, 1, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        total += tl.load(x + start, mask=k + start < K, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=2)[:, :, None] / K
    squares = tl.zeros([BLOCK_M, 1, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        centred = tl.load(x + start, mask=k + start < K, other=0.0).to(tl.float32) - mean
        squares += tl.where(k + start < K, centred * centred, 0.0)
    return mean, tl.rsqrt(tl.sum(squares, axis=2)[:, :, None] / K + eps)


@jit
def multiply_step(weights, x, gain, shift, k, end, mean, rstd, NORM: tl.constexpr, VECTOR: tl.constexpr):
    """Return the partial sums of one step: the products [BLOCK_M, BLOCK_N, BLOCK_K / VECTOR], and Σx² [BLOCK_M, 1,
    BLOCK_K / VECTOR] if NORM is "rms", else 0.0. `weights` [1, BLOCK_N, BLOCK_K] are values; x [BLOCK_M, 1, BLOCK_K]
    points to columns k [1, 1, BLOCK_K]; columns from `end` on count as 0. The caller divides by the RMS."""
    v = tl.load(x, mask=k < end, other=0.0).to(tl.float32)
    squares = sum_vectors(v * v, VECTOR) if NORM == "rms" else 0.0
    if NORM == "layer":
        v = (v - mean) * rstd
    if gain is not None:
        v *= tl.load(gain + k, mask=k < end, other=0.0).to(tl.float32)
    if shift is not None:
        v += tl.load(shift + k, mask=k < end, other=0.0).to(tl.float32)
    return sum_vectors(weights.to(tl.float32) * v, VECTOR), squares


@jit
def load_weights(weight, rows, k, end, K):
    """Return columns k [1, 1, BLOCK_K] of `rows` of W [·, K] as [1, BLOCK_N, BLOCK_K]; 0 from column `end` on."""
    at = weight + rows.to(tl.int64)[None, :, None] * K + k
    return tl.load(at, mask=k < end, other=0.0, eviction_policy="evict_first")


@jit
def load_first_weights(
    weight, rows, K, begin, end, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr
):
    """Load the weights of the first step of `norm_product`; call this before `wait_for_previous`. If STAGES is 0 (CUDA
    cores), return them, [1, BLOCK_N, BLOCK_K]. Else (tensor cores) return 0.0, which is not used, and with PDL prefetch
    them into L2."""
    if STAGES > 0:
        if PDL:
            if BITS > 0:
                CHUNK: tl.constexpr = 512 // BITS
                words = tl.cdiv(K, CHUNK) * 16
                first, last = begin // CHUNK * 16, tl.cdiv(end, CHUNK) * 16
                prefetch_rows(as_words(weight), rows, words, first, last, BLOCK_K * BITS // 16)
            else:
                prefetch_rows(weight, rows, K, begin, end, 2 * BLOCK_K)
        return 0.0
    else:  # Triton compiles what follows a `return`
        return load_weights(weight, rows, begin + tl.arange(0, BLOCK_K)[None, None, :], end, K)


@jit
def norm_product(
    first, x, x_row, weight, scales, offsets, gain, shift, rows, M, N, K, begin, end, eps,
    NORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr,
    STAGES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return norm(x) Wᵀ, fp32 [BLOCK_M, BLOCK_N], of x [M, K] and `rows` [BLOCK_N] of W [N, K] over columns `begin` to
    `end` − 1. With a norm, `begin` is 0 and `end` is K. `first` is the result of `load_first_weights`. x_row is the row
    stride of x; rows from M on repeat the last. STAGES > 0 selects tensor cores. BITS > 0 selects codes with `scales`
    and `offsets`."""
    if BITS > 0:
        return code_products(
            x, x_row, weight, scales, offsets, gain, shift, rows, M, N, K, begin, end, eps,
            NORM, BITS, GROUP, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
    elif STAGES > 0:
        x_rows = x + tl.minimum(tl.arange(0, BLOCK_M), M - 1) * x_row
        rows = weight + rows.to(tl.int64) * K
        out, _ = dot_products(
            x_rows, rows, None, gain, shift, K, begin, end, eps, NORM, BLOCK_M, BLOCK_N, BLOCK_K, STAGES
        )  # fmt: skip
        return out
    else:
        k = begin + tl.arange(0, BLOCK_K)[None, None, :]
        m = tl.minimum(tl.arange(0, BLOCK_M), M - 1)[:, None, None]
        from_x = x + m * x_row + k
        from_weight = weight + rows.to(tl.int64)[None, :, None] * K + k
        mean, rstd = moments(from_x, k, K, eps, BLOCK_M, BLOCK_K) if NORM == "layer" else (0.0, 1.0)
        total, squares = multiply_step(first, from_x, gain, shift, k, end, mean, rstd, NORM, VECTOR)
        for start in range(BLOCK_K, end - begin, BLOCK_K):
            at = k + start
            next_w = tl.load(from_weight + start, mask=at < end, other=0.0, eviction_policy="evict_first")
            part, part_squares = multiply_step(next_w, from_x + start, gain, shift, at, end, mean, rstd, NORM, VECTOR)
            total += part
            squares += part_squares
        y = tl.sum(total, axis=2)
        return y * tl.rsqrt(tl.sum(squares, axis=2) / K + eps) if NORM == "rms" else y


@jit
def norm_affine(
    x, x_row, weight, scales, offsets, gain, shift, bias, rows, M, N, K, eps, NORM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return norm(x) Wᵀ + bias, fp32 [BLOCK_M, BLOCK_N], over all K columns; parameters as in `norm_product`. Load the
    first weights, wait for the preceding kernel, then multiply."""
    first = load_first_weights(weight, rows, K, 0, K, BLOCK_K, STAGES, BITS, PDL)
    wait_for_previous(PDL)
    out = norm_product(
        first, x, x_row, weight, scales, offsets, gain, shift, rows, M, N, K, 0, K, eps,
        NORM, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR, STAGES, BITS, GROUP, EVEN,
    )  # fmt: skip
    if bias is not None:
        out += tl.load(bias + rows).to(tl.float32)[None, :]
    return out

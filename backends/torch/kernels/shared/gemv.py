"""Products of few rows: norm(x) Wᵀ for up to 64 rows x, with W read once; up to 3 of them on CUDA cores.

At batch 1 a linear layer is as fast as its weights arrive. So each block owns a few rows of W and streams them with
16-byte loads, each thread several at a time, and multiplies in fp32. The norm costs no pass of its own: an RMS norm
divides by one number per row of x, which is known once the columns have passed and then divides the sums (FlashNorm,
arXiv 2407.09577); x comes from cache. The first weights are asked for before the kernel that writes x has ended, and
so weights must not be what a kernel of the same step writes.

From 4 rows on, CUDA cores could not multiply as fast as weights arrive, and tensor cores do: see `dots`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from . import launch
from .codes import TILE, Codes, as_words, chunk, code_products
from .dots import dot_products, prefetch_rows
from .float8 import FLOAT4, FLOAT8, SHORT
from .launch import DTYPES, jit, options, tl, wait
from .norm import Norm
from .operands import gradient_refusal, power_of_2

PROCESSORS = 132  # streaming multiprocessors of an H200
MOST_ROWS = 64  # of x; for more, products are those of a prefill, and libraries compute them
DOT_ROWS = 4  # from so many on tensor cores multiply
STAGED = 108 * 1024  # bytes of shared memory for the tiles of a block: two blocks fit on a multiprocessor
ON_THE_WAY = 40 * 1024  # bytes of weights that a multiprocessor must have asked for, to wait for none: 5 TB/s for 1 µs


@dataclass(frozen=True)
class Tile:
    """The work of a block: `rows` of W for `batch` rows of x, `columns` at a time, `vector` of them per load.

    `stages` are those of a loop over products on tensor cores, 0 on CUDA cores. If W is in codes of `bits` with a scale
    for each `group`, `even` says that there are no columns beyond steps.
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
        """The constants of the kernels that this is."""
        shape = {"BLOCK_M": self.batch, "BLOCK_N": self.rows, "BLOCK_K": self.columns, "VECTOR": self.vector}
        return {**shape, "STAGES": self.stages, "BITS": self.bits, "GROUP": self.group, "EVEN": self.even}

    def within(self, outputs: int) -> Tile:
        """The tile of a block that must not have more rows than a head, which has so many `outputs`."""
        return replace(self, rows=min(self.rows, 1 << (outputs.bit_length() - 1)))

    def options(self, x: torch.Tensor) -> dict[str, Any]:
        """The keywords of a launch on the device of x; other loops have no stages, as they ask ahead themselves."""
        return {**self.constants, **options(x, self.warps, 1)}


Weight = torch.Tensor | Codes


def parts(weight: Weight) -> tuple[Any, Any, Any]:
    """Numbers or codes, scales, offsets: what kernels read of `weight`."""
    return weight.parts if isinstance(weight, Codes) else (weight, None, None)


def tile(
    batch: int, outputs: int, inputs: int, dtype: torch.dtype, least: int = 1, weight: Weight | None = None
) -> Tile:
    """The tile for `batch` rows of x and W [outputs, inputs]; `least` is how many rows of W must go together.

    On CUDA cores warps share the columns: as many as leave few lanes without a column. Each thread has 64 bytes of
    weights on the way or more: of four rows or eight, or, where that would leave multiprocessors with less than four
    blocks, of fewer rows and more columns, for up to two rows of x; registers hold no more.
    """
    vector = 16 // dtype.itemsize
    if isinstance(weight, Codes):
        small = weight.packed.dtype == FLOAT4
        return coded(batch, outputs, inputs, weight.bits, weight.group, dtype.itemsize, small)
    if batch >= DOT_ROWS:
        return _dots(power_of_2(batch, 8), outputs, inputs, dtype.itemsize)
    warps = next(w for w in (4, 2, 1) if w == 1 or -inputs % (32 * vector * w) <= inputs // 8)
    rows = next(r for r in (8, 4, 2, 1) if r == least or outputs // r >= (16 if r == 8 else 4) * PROCESSORS)
    rows, wide = (rows, max(1, 4 // rows)) if batch <= 2 else (min(rows, 4), 1)
    columns = 32 * vector * warps
    while wide > 1 and columns < inputs:
        columns, wide = 2 * columns, wide // 2
    return Tile(power_of_2(batch), rows, columns, vector, warps)


def _dots(batch: int, outputs: int, inputs: int, size: int) -> Tile:
    """The tile on tensor cores: so many rows of W that every multiprocessor has a block, but not less than rows of x,
    which every block reads; a warp for each 16 of them."""
    least = max(16, min(batch, 64))
    rows = next(r for r in (64, 32, 16) if r == least or outputs // r >= PROCESSORS)
    wide = size < 4 and rows == 16 and batch <= 16
    columns = min({1: 256, 2: 128, 4: 32}[size] * (1 + wide), power_of_2(inputs, 32))
    stages = staged(rows * columns * size, batch * columns * size, outputs // rows)
    return Tile(batch, rows, columns, 16 // size, rows // 16, stages)


def coded(batch: int, outputs: int, inputs: int, bits: int, group: int, size: int = 2, small: bool = False) -> Tile:
    """The tile for W in codes and x in numbers of `size` bytes: 32 rows of W to a warp, two warps or one, as leave
    every multiprocessor a block, but four of many rows of x, which all of them read; two chunks at a time, or one where
    two do not divide the columns, or registers would not hold what groups need.

    Of 16 rows of x, or 32, a warp takes 64 of W where there are so many, as far as registers hold that: x and its norm
    are then prepared half as often. `small` says that codes are floats of 4 bits.
    """
    many = group < 64 and bits == 4  # scales, whose registers one row alone would not leave
    batch, one = 1 if batch == 1 and not many else power_of_2(batch, 8), chunk(bits)
    wide = batch >= 32 or (batch == 16 and outputs // 128 >= PROCESSORS)
    rows = 128 if wide else 64 if batch == 16 or outputs // 64 >= PROCESSORS else 32
    held = batch == 16 or (batch == 32 and bits == 4 and size == 2)
    double = held and not many and outputs // 256 >= PROCESSORS * 3 // 4
    rows = 256 if double else rows
    if small and group == SHORT and batch < 16:  # two warps would spill registers under Triton 3.6
        rows = 32
    step = one if batch == 64 or many or double or inputs % (2 * one) else 2 * one
    if group % TILE and not (small and group == SHORT):
        group = -(-group // step) * step  # of all columns, which may be any number
    stages = staged(rows * step * bits // 8, batch * step * 2, outputs // rows)
    return Tile(batch, rows, step, 1, rows // (64 if double else 32), stages, bits, group, inputs % step == 0)


def staged(weights: int, others: int, blocks: int) -> int:
    """Return the stages of a loop over tiles of so many bytes of weights and of x, if there are so many blocks."""
    asked = -(-ON_THE_WAY // (weights * max(1, min(blocks // PROCESSORS, 8)))) + 1
    return max(2, min(6, max(3, asked), STAGED // (weights + others)))


def check(x: torch.Tensor, weight: Weight, norm: Norm, bias: torch.Tensor | None) -> None:
    """Check that x [..., in], weight [out, in], norm and bias [out] fit.

    Raises:
        ValueError: if they do not.
    """
    if weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {list(x.shape)} does not fit weight {list(weight.shape)} [out, in]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)} does not fit weight {list(weight.shape)} [out, in]")
    norm.check(x.shape[-1])


def flat(x: torch.Tensor) -> torch.Tensor:
    """x [..., in] as rows [n, in] whose numbers are beside each other; a slice of wider rows stays in its place."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def few_rows(x: torch.Tensor) -> bool | None:
    """Return whether x [..., in] has from 1 to MOST_ROWS rows; None in a model that is exported for any number."""
    if torch.compiler.is_exporting() and not isinstance(x.numel(), int):
        return None
    return 0 < x.numel() <= MOST_ROWS * x.shape[-1]


def refusal(x: torch.Tensor, *others: Weight | None) -> str | None:
    """Say why these kernels do not take x [..., in] with weights and `others`, in a few words; None if they do."""
    if not x.is_cuda and (reason := launch.refusal(x)):  # at once: on a CPU a call of torch takes a microsecond
        return reason
    given = [tensor for tensor in others if isinstance(tensor, torch.Tensor)]
    coded = [part for one in others if isinstance(one, Codes) for part in one.parts if part is not None]
    if reason := launch.refusal(x, any(part.dtype == FLOAT8 for part in coded)):
        return reason
    if x.dtype not in DTYPES:
        return f"{x.dtype} is none of {', '.join(DTYPES.values())}"
    if any(tensor.dtype != x.dtype for tensor in given):
        return f"not all is {x.dtype} as x is"
    if not few_rows(x):
        return f"not 1 to {MOST_ROWS} rows"
    if not all(tensor.is_contiguous() for tensor in (*given, *coded)):
        return "not all is contiguous"
    return gradient_refusal(x, *given, *coded)


@jit
def fold(x, VECTOR: tl.constexpr):
    """Sums of VECTOR neighbours [a, b, c] → [a, b, c / VECTOR]: what one thread holds, so nothing is exchanged."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // VECTOR, VECTOR]), axis=3)


@jit
def moments(x, k, K, eps, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Mean and 1/√(variance + ε) [BLOCK_M, 1, 1] of rows at pointers x, columns k [1, 1, BLOCK_K] onward."""
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
def weighted(weights, x, gain, shift, k, end, mean, rstd, NORM: tl.constexpr, VECTOR: tl.constexpr):
    """One step along the columns: its part of the products [BLOCK_M, BLOCK_N, …] and of Σx² [BLOCK_M, 1, …]."""
    v = tl.load(x, mask=k < end, other=0.0).to(tl.float32)
    squares = fold(v * v, VECTOR) if NORM == "rms" else 0.0
    if NORM == "layer":
        v = (v - mean) * rstd
    if gain is not None:
        v *= tl.load(gain + k, mask=k < end, other=0.0).to(tl.float32)
    if shift is not None:
        v += tl.load(shift + k, mask=k < end, other=0.0).to(tl.float32)
    return fold(weights.to(tl.float32) * v, VECTOR), squares


@jit
def weights_at(weight, rows, k, end, K):
    """Columns k [1, 1, BLOCK_K] below `end` of `rows` [BLOCK_N] of W [·, K], read once: [1, BLOCK_N, BLOCK_K]."""
    at = weight + rows.to(tl.int64)[None, :, None] * K + k
    return tl.load(at, mask=k < end, other=0.0, eviction_policy="evict_first")


@jit
def first_weights(
    weight, rows, K, begin, end, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr
):
    """Ask for the first weights of `products` before anything that the kernel ahead writes.

    They are [1, BLOCK_N, BLOCK_K] on CUDA cores. For tensor cores they come to L2, and what is returned says nothing.
    """
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
        return weights_at(weight, rows, begin + tl.arange(0, BLOCK_K)[None, None, :], end, K)


@jit
def products(
    first, x, x_row, weight, scales, offsets, gain, shift, rows, M, N, K, begin, end, eps,
    NORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr,
    STAGES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """norm(x) Wᵀ of x [M, K] and `rows` [BLOCK_N] of W [N, K], columns `begin` to `end`: fp32 [BLOCK_M, BLOCK_N].

    A norm needs all columns. Rows of x are x_row apart; those beyond M repeat the last. STAGES says which cores, BITS
    whether W is in codes.
    """
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
        total, squares = weighted(first, from_x, gain, shift, k, end, mean, rstd, NORM, VECTOR)
        for start in range(BLOCK_K, end - begin, BLOCK_K):
            at = k + start
            more = tl.load(from_weight + start, mask=at < end, other=0.0, eviction_policy="evict_first")
            part, part_squares = weighted(more, from_x + start, gain, shift, at, end, mean, rstd, NORM, VECTOR)
            total += part
            squares += part_squares
        y = tl.sum(total, axis=2)
        return y * tl.rsqrt(tl.sum(squares, axis=2) / K + eps) if NORM == "rms" else y


@jit
def affine(
    x, x_row, weight, scales, offsets, gain, shift, bias, rows, M, N, K, eps, NORM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`products` over all K columns, plus bias; it waits for the kernel ahead, with the first weights on their way."""
    first = first_weights(weight, rows, K, 0, K, BLOCK_K, STAGES, BITS, PDL)
    wait(PDL)
    out = products(
        first, x, x_row, weight, scales, offsets, gain, shift, rows, M, N, K, 0, K, eps,
        NORM, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR, STAGES, BITS, GROUP, EVEN,
    )  # fmt: skip
    if bias is not None:
        out += tl.load(bias + rows).to(tl.float32)[None, :]
    return out

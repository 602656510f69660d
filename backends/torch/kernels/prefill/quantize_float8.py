"""Quantization of activations to FP8 (e4m3) with a scale per group of a row, for FP8 GEMMs.

The largest absolute value of a group becomes 448, the largest FP8 value. The bytes of a group are in the order of
packed weights (`shared.quantized_gemv`), so that the GEMMs need no second copy of the weights.
"""

from __future__ import annotations

import torch

from ..shared import launch
from ..shared.float8 import FLOAT8, LARGEST, round_float8, to_float8
from ..shared.launch import jit, start_next, tl, triton, uses_torch, wait_for_previous
from ..shared.operands import gradient_refusal

ROWS = 8  # of a program
STEP = 128  # columns at a time


@jit
def quantize_float8_kernel(
    x, y, scales, M, K, x_row, width,
    GROUP: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantize one group of ROWS rows of x [M, K] into y [M, width]. Grid [blocks of ROWS rows, groups]."""
    start_next(PDL)
    wait_for_previous(PDL)
    m, group = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    at = tl.arange(0, STEP)
    # Byte b of word i holds element 2i + b // 2 of tile b % 2; a tile has 32 elements.
    column = at // 64 * 64 + at % 2 * 32 + at % 64 // 4 * 2 + at % 4 // 2
    from_x = x + m.to(tl.int64)[:, None] * x_row
    there, end = (m < M)[:, None], tl.minimum(group * GROUP + GROUP, K)
    largest = tl.zeros([ROWS], tl.float32)
    for start in range(group * GROUP, end, STEP):
        some = tl.load(from_x + start + at[None, :], mask=there & (start + at < end)[None, :], other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(some.to(tl.float32)), axis=1))
    scale = tl.where(largest > 0, largest / 448.0, 1.0)
    tl.store(scales + group * M + m, scale, mask=m < M)
    for start in range(group * GROUP, tl.minimum(group * GROUP + GROUP, width), STEP):
        source = start + column
        some = tl.load(from_x + source[None, :], mask=there & (source < end)[None, :], other=0.0)
        numbers = round_float8(some.to(tl.float32) / scale[:, None])
        inside = there & (start + at < width)[None, :]
        tl.store(y + m.to(tl.int64)[:, None] * width + (start + at)[None, :], numbers, mask=inside)


def refusal(x: torch.Tensor) -> str | None:
    """Return the reason why the kernel cannot take x, in a few words; None if it can."""
    return launch.refusal(x, True, x.dtype) or gradient_refusal(x)


def quantize_float8(x: torch.Tensor, group: int, *, kernel: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [rows, in] as FP8 values, float8_e4m3fn [rows, bytes], and their scales, f32 [rows, groups] with strides
    [1, rows], one per `group` elements of a row: x ≈ scale · value.

    The bytes of a row are ordered and zero-padded like a row of packed weights (`shared.quantized_gemv`). `group` is a
    multiple of 64, or `in`. Values are rounded to nearest, ties to even. `kernel` is as in `uses_torch`. Raise
    ValueError if `group` is neither `in` nor a multiple of 64 that divides `in`.
    """
    K, width = x.shape[1], padded_width(x)
    if group != K and (group % 64 or K % group):
        raise ValueError(f"x {[*x.shape]} cannot be split into groups of {group}; they must be multiples of 64")
    if uses_torch(kernel, refusal, x):
        padded = torch.nn.functional.pad(x.float(), (0, width - K)).unflatten(1, (K // group, -1))
        largest = padded.abs().amax(2)
        scales = torch.where(largest > 0, largest / LARGEST, 1.0)
        tiles = (padded / scales[..., None]).flatten(1).unflatten(1, (-1, 2, 16, 2))
        return to_float8(tiles.permute(0, 1, 3, 4, 2).flatten(1)), scales.T.contiguous().T
    return launch_quantize(x, group)


def padded_width(x: torch.Tensor) -> int:
    """Return the bytes of a row of x in FP8: its elements, rounded up to a multiple of 64."""
    return -(-x.shape[1] // 64) * 64


def _empty(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    floats = x.new_empty(len(x), padded_width(x), dtype=FLOAT8)
    return floats, x.new_empty(x.shape[1] // group, len(x), dtype=torch.float32).T


@launch.custom_operator(_empty)
def launch_quantize(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `quantize_float8` with the kernel, without checks."""
    y, scales = _empty(x, group)
    (M, K), width = x.shape, y.shape[1]
    rows = x if x.stride(1) == 1 else x.contiguous()
    size = {"GROUP": group if group != K else width, "ROWS": ROWS, "STEP": min(STEP, group if group != K else STEP)}
    quantize_float8_kernel[(triton.cdiv(M, ROWS), K // group)](
        rows, y, scales, M, K, rows.stride(0), width, **size, **launch.options(x, 4, 1)
    )
    return y, scales

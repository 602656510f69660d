"""Weights that stay in the 4- or 8-bit blocks of a checkpoint, and are widened a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.norm_linear import norm_linear
from ..kernels.prompt.to_float8 import to_float8
from ..kernels.prompt.widen import widen, widens
from ..kernels.shared.codes import Codes
from ..kernels.shared.gemv import few_rows
from .tables import restore


def widened(codes: Tensor, scales: Tensor, offsets: Tensor | None, bits: int, width: int) -> Tensor:
    """Rows of the W of a `Quantized`, f32 [rows, columns], padded, in the order of the bytes of the words: one number
    for each, or first those of their lower halves, then those of the upper ones. `in_bytes` gives x this order."""
    if codes.dtype == torch.float8_e4m3fn:
        centred = codes[:, None]
    else:
        packed = codes.view(torch.uint8)
        halves = torch.stack((packed << 4, packed), 1) if bits == 4 else packed[:, None]
        centred = (halves ^ 128).view(torch.int8) >> (8 - bits)
    numbers = centred.unflatten(2, (-1, 16, 2, 2)).float()
    numbers = numbers.mul_(_of_tiles(scales, bits, width))
    return (numbers if offsets is None else numbers.add_(_of_tiles(offsets, bits, width))).flatten(1)


def _of_tiles(of_groups: Tensor, bits: int, width: int) -> Tensor:
    """Scales or offsets of groups, [groups, rows], for each number of `widened` [rows, 8/bits, chunks, 1, 1, 2]."""
    tiles = 16 // bits
    each = of_groups.T.repeat_interleave(-(-width // (32 * len(of_groups))), 1)
    return (
        F.pad(each, (0, -each.shape[1] % tiles))
        .unflatten(1, (-1, 2, tiles // 2))
        .permute(0, 3, 1, 2)[:, :, :, None, None]
    )


def in_bytes(x: Tensor, bits: int) -> Tensor:
    """x [..., in] in the order of `widened`, padded with zeros."""
    tiles = 16 // bits
    x = F.pad(x, (0, -x.shape[-1] % (32 * tiles))).unflatten(-1, (-1, 2, tiles // 2, 16, 2))
    return x.movedim(-3, -5).movedim(-3, -1).flatten(-5)


def block_linear(
    x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None = None, bias: Tensor | None = None, bits: int = 4
) -> Tensor:
    """x Wᵀ + b, x [..., in], with the W of a `Quantized`, on a CPU in parts that fit into a cache."""
    width, dtype = x.shape[-1], x.dtype
    whole = Codes(codes, scales, offsets, bits, width)
    by_kernel = widens(whole, dtype)
    x = x if by_kernel else in_bytes(x, bits)
    rows = max(1, (1 << 26 if by_kernel else 1 << 19) // width)
    parts = []
    for first in range(0, len(codes), rows):
        part = whole.rows(slice(first, first + rows))
        parts.append(F.linear(x, widen(part, dtype) if by_kernel else widened(*part.parts, bits, width).to(dtype)))
    y = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    return y if bias is None else y + bias


def float8_linear(
    x: Tensor, codes: Tensor, scales: Tensor, offsets: None = None, bias: Tensor | None = None, bits: int = 8
) -> Tensor:
    """x Wᵀ + b with the W of a `Quantized` of floats; of more than 64 rows x is rounded to floats, too, by groups
    (arXiv 2412.19437, 3.3), unless a model is exported for any number of them. Tensor cores of GPUs multiply them where
    torch has an operator for it."""
    rows, width = x.flatten(0, -2), x.shape[-1]
    few = few_rows(x)
    if few is None or few:
        return block_linear(x, codes, scales, None, bias, bits)
    numbers, own = to_float8(rows, width // len(scales))
    if multiplies_float8(x, width // len(scales), codes):
        recipe = F.ScalingType.RowWise if len(scales) == 1 else F.ScalingType.BlockWise1x128
        others = scales if len(scales) == 1 else scales.T
        y = F.scaled_mm(numbers, codes.T, own, recipe, others, recipe, output_dtype=x.dtype)
        return (y if bias is None else y + bias).view(*x.shape[:-1], -1)
    exact = numbers.float().unflatten(1, (-1, 16, 2, 2)).permute(0, 1, 4, 2, 3).flatten(1)[:, :width]
    exact = (exact.unflatten(1, (len(scales), -1)) * own[..., None]).view(x.shape)
    return block_linear(exact.to(x.dtype), codes, scales, None, bias, bits)


def multiplies_float8(x: Tensor, group: int, codes: Tensor) -> bool:
    """Return whether torch multiplies x as floats by `codes` where they are: bf16 on a GPU that has products of FP8."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (9, 0):
        return False
    return len(codes) % 16 == 0 and (group == 128 or group == x.shape[-1] == codes.shape[1])


class Quantized(nn.Module):
    """W [out, in] = scale · (code − 2^{bits−1}) + offset, with a scale, and maybe an offset, for each `group` weights
    of a row; or scale · code, if codes are `floats` of 8 bits, float8_e4m3fn. With `activations` x is rounded to these,
    too, where it has many rows. Buffers: `codes` i32 [out, words], `scales` and `offsets` (f32) [in/group, out].

    16 words hold 16/bits tiles of 32 codes: codes 2i and 2i + 1 of tile t stand in word i, from bits t·bits and
    16 + t·bits on. The buffers keep their dtype when the model is cast, and are not trained: gradients only pass
    through, to what is multiplied and to biases.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bits: int,
        group: int,
        offsets: bool = False,
        scales: torch.dtype = torch.half,
        floats: bool = False,
        activations: bool = False,
    ) -> None:
        super().__init__()
        self.bits, self.width, groups = bits, inputs, inputs // group
        self.floats, self.product = floats, float8_linear if activations else block_linear
        self.register_buffer("codes", torch.empty(outputs, -(-inputs * bits // 512) * 16, dtype=torch.int32))
        self.register_buffer("scales", torch.empty(groups, outputs, dtype=scales))
        self.register_buffer("offsets", torch.empty(groups, outputs, dtype=torch.float32) if offsets else None)
        self.register_parameter("bias", None)

    def blocks(self) -> Codes:
        """W as kernels take it, which read the codes."""
        offsets = None if self.offsets is None else self.offsets.contiguous()
        return Codes(self.typed(self.codes), self.scales.contiguous(), offsets, self.bits, self.width, self.product)

    def typed(self, codes: Tensor) -> Tensor:
        """`codes` i32 [rows, words], or what they are if they are floats: float8_e4m3fn [rows, 4·words]."""
        return codes.view(torch.float8_e4m3fn) if self.floats else codes

    def linear(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, of up to 64 rows on a GPU by a kernel."""
        return norm_linear(x, self.blocks(), self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = dict(self.named_buffers())
        super()._apply(fn, recurse)
        restore(self, kept)
        return self


class QuantizedLinear(Quantized):
    """y = x Wᵀ + b."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, **layout: Any) -> None:
        super().__init__(inputs, outputs, **layout)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class QuantizedEmbedding(Quantized):
    """Rows of W, in f32."""

    def __init__(self, rows: int, width: int, **layout: Any) -> None:
        super().__init__(width, rows, **layout)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.flatten()
        offsets = None if self.offsets is None else self.offsets[:, n]
        rows = widened(self.typed(self.codes[n]), self.scales[:, n], offsets, self.bits, self.width)
        rows = rows.unflatten(1, (8 // self.bits, -1, 16, 2, 2)).permute(0, 2, 5, 1, 3, 4).flatten(1)
        return rows[:, : self.width].contiguous().view(*ids.shape, -1)

"""Weights that stay in the 4- or 8-bit blocks of a checkpoint, and are widened a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.quantized_linear import quantized_linear
from .tables import restore


def widened(codes: Tensor, scales: Tensor, offsets: Tensor | None, bits: int) -> Tensor:
    """Rows of the W of a `Quantized`, f32 [rows, 8/bits, groups, bytes]: one number for each byte of the words, or
    first those of its lower halves, then those of its upper ones."""
    packed = codes.view(torch.uint8)
    halves = torch.stack((packed << 4, packed), 1) if bits == 4 else packed[:, None]
    signed = (halves ^ 128).view(torch.int8) >> (8 - bits)
    numbers = signed.unflatten(2, (len(scales), -1)).float().mul_(scales.T[:, None, :, None])
    return numbers if offsets is None else numbers.add_(offsets.T[:, None, :, None])


def block_linear(
    x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """x Wᵀ + b, x [..., in], with the W of a `Quantized`, on a CPU in parts that fit into a cache."""
    groups, width = len(scales), x.shape[-1]
    bits = 32 * codes.shape[1] // width
    x = x.unflatten(-1, (groups, 4, 8 // bits, width // groups * bits // 32)).movedim(-2, -4)
    x = x.transpose(-1, -2).flatten(-4)  # in the order of `widened`
    rows = max(1, (1 << 26 if x.is_cuda else 1 << 19) // width)
    parts = []
    for first in range(0, len(codes), rows):
        part = slice(first, first + rows)
        weight = widened(codes[part], scales[:, part], None if offsets is None else offsets[:, part], bits)
        parts.append(F.linear(x, weight.flatten(1).to(x.dtype)))
    y = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    return y if bias is None else y + bias


class Quantized(nn.Module):
    """W [out, in] = scale · (code − 2^{bits−1}) + offset, with a scale, and maybe an offset, for each `group` weights
    of a row. Buffers: `codes` i32 [out, in·bits/32], `scales` and `offsets` (f32) [in/group, out].

    A group fills R words; code s of word i, its bits from s·bits on, is weight s·R + i. The buffers keep their dtype
    when the model is cast, and are not trained: gradients only pass through, to what is multiplied and to biases.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    bias: Tensor | None

    def __init__(
        self, inputs: int, outputs: int, bits: int, group: int, offsets: bool = False, scales: torch.dtype = torch.half
    ) -> None:
        super().__init__()
        self.bits, groups = bits, inputs // group
        self.register_buffer("codes", torch.empty(outputs, inputs * bits // 32, dtype=torch.int32))
        self.register_buffer("scales", torch.empty(groups, outputs, dtype=scales))
        self.register_buffer("offsets", torch.empty(groups, outputs, dtype=torch.float32) if offsets else None)
        self.register_parameter("bias", None)

    def linear(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, of up to 8 rows on a GPU by a kernel that reads the codes."""
        return quantized_linear(x, self.codes, self.scales, self.offsets, self.bias, otherwise=block_linear)

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
        rows = widened(self.codes[n], self.scales[:, n], offsets, self.bits).unflatten(-1, (-1, 4))
        return rows.permute(0, 2, 4, 1, 3).reshape(*ids.shape, -1)

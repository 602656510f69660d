"""Linear layers and embeddings with packed 4- or 8-bit weights, from a checkpoint or a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.cpu.packed import packed_linear
from ..kernels.norm_linear import norm_linear
from ..kernels.prefill.dequantize_weights import can_dequantize, dequantize_weights
from ..kernels.prefill.quantize_float8 import quantize_float8
from ..kernels.shared.gemv import has_few_rows
from ..kernels.shared.quantized_gemv import Codes, dequantize
from .constant_tables import restore


def dequantize_rows(codes: Tensor, scales: Tensor, offsets: Tensor | None, bits: int, width: int) -> Tensor:
    """Return rows of the weight of a `Quantized`, given their codes, scales and offsets: f32 [rows, width]."""
    if codes.dtype == torch.uint8:  # FP4
        return dequantize(codes, scales, offsets, bits=bits, width=width)
    if bits == 4:
        # Two codes at a time: 0x4300 | code is 128 + code in bf16.
        shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=codes.device)[:, None]
        words = codes.unflatten(1, (-1, 1, 16)) >> shifts
        numbers, middle = (words & 0x000F000F | 0x43004300).view(torch.bfloat16).flatten(1), 136
    else:
        floats = codes.dtype == torch.float8_e4m3fn
        tiles = (codes if floats else codes.view(torch.uint8)).unflatten(1, (-1, 16, 2, 2))
        numbers, middle = tiles.permute(0, 1, 4, 2, 3).flatten(1), 0 if floats else 128
    numbers = numbers[:, :width].unflatten(1, (len(scales), -1)).float()
    numbers = numbers.sub_(middle).mul_(scales.T[..., None])
    return (numbers if offsets is None else numbers.add_(offsets.T[..., None])).flatten(1)


def block_linear(
    x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None = None, bias: Tensor | None = None, bits: int = 4
) -> Tensor:
    """Return x Wᵀ + b, x [..., in] → [..., out], for W given by codes, scales and offsets as in `Quantized`. Where
    `packed_linear` cannot run, W is dequantized for each product, in parts of rows, which fit into a CPU's cache."""
    width, dtype = x.shape[-1], x.dtype
    packed = packed_linear(x, codes, scales, offsets, bits)
    if packed is not None:
        return packed if bias is None else packed + bias
    weight = Codes(codes, scales, offsets, bits, width)
    by_kernel = can_dequantize(weight, dtype)
    rows = max(1, (1 << 26 if by_kernel else 1 << 19) // width)
    parts = []
    for first in range(0, len(codes), rows):
        part = weight.rows(slice(first, first + rows))
        w = dequantize_weights(part, dtype) if by_kernel else dequantize_rows(*part.parts, bits, width).to(dtype)
        parts.append(F.linear(x, w))
    y = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    return y if bias is None else y + bias


def float8_linear(
    x: Tensor, codes: Tensor, scales: Tensor, offsets: None = None, bias: Tensor | None = None, bits: int = 8
) -> Tensor:
    """Return x Wᵀ + b with the FP8 weight of a `Quantized`. An x of more than 64 rows is also quantized to FP8, by
    groups (arXiv 2412.19437, 3.3), except in an export with a symbolic number of rows. FP8 tensor cores are used where
    torch has an operator for them."""
    rows, width = x.flatten(0, -2), x.shape[-1]
    few = has_few_rows(x)
    if few is None or few:
        return block_linear(x, codes, scales, None, bias, bits)
    numbers, row_scales = quantize_float8(rows, width // len(scales))
    if multiplies_float8(x, width // len(scales), codes):
        recipe = F.ScalingType.RowWise if len(scales) == 1 else F.ScalingType.BlockWise1x128
        weight_scales = scales if len(scales) == 1 else scales.T
        y = F.scaled_mm(numbers, codes.T, row_scales, recipe, weight_scales, recipe, output_dtype=x.dtype)
        return (y if bias is None else y + bias).view(*x.shape[:-1], -1)
    exact = numbers.float().unflatten(1, (-1, 16, 2, 2)).permute(0, 1, 4, 2, 3).flatten(1)[:, :width]
    exact = (exact.unflatten(1, (len(scales), -1)) * row_scales[..., None]).view(x.shape)
    return block_linear(exact.to(x.dtype), codes, scales, None, bias, bits)


def multiplies_float8(x: Tensor, group: int, codes: Tensor) -> bool:
    """Return whether torch can multiply x and `codes` in FP8: x in bf16 on a GPU with FP8 tensor cores, and groups that
    its operator supports."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (9, 0):
        return False
    return len(codes) % 16 == 0 and (group == 128 or group == x.shape[-1] == codes.shape[1])


class Quantized(nn.Module):
    """A packed weight W [out, in] = scale · (code − 2^{bits−1}) + offset, with a scale and optionally an offset for
    each `group` weights of a row. With `floats`, W = scale · code, where codes are FP8 (e4m3) or FP4. With
    `activations`, an x of more than 64 rows is also quantized to FP8. Buffers: `codes` i32 [out, words], `scales` and
    `offsets` (f32 or None) [in/group, out].

    FP4 codes are e2m1, with 8-bit `scales` stored as u8 bytes: float8_e8m0fnu, powers of two (mxfp4); or float8_e4m3fn
    (nvfp4), multiplied by `tensor_scales` f32 [1, out], which are equal for all rows of a matrix.

    16 words hold 16/bits tiles of 32 codes: codes 2i and 2i + 1 of tile t are in word i, from bits t·bits and 16 +
    t·bits on. The buffers keep their dtype when the model is cast, and are not trained: gradients only flow to x and to
    biases.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    tensor_scales: Tensor | None
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
        self.kind, small = scales, floats and bits == 4
        self.register_buffer("scales", torch.empty(groups, outputs, dtype=torch.uint8 if small else scales))
        self.register_buffer("offsets", torch.empty(groups, outputs, dtype=torch.float32) if offsets else None)
        exact = small and scales == torch.float8_e4m3fn
        self.register_buffer("tensor_scales", torch.empty(1, outputs, dtype=torch.float32) if exact else None)
        self.register_parameter("bias", None)

    def blocks(self) -> Codes:
        """Return W as the operand of kernels."""
        offsets = self.offsets if self.tensor_scales is None else self.tensor_scales
        offsets = None if offsets is None else offsets.contiguous()
        scales = self.numbers(self.scales).contiguous()
        return Codes(self.bit_cast(self.codes), scales, offsets, self.bits, self.width, self.product)

    def bit_cast(self, codes: Tensor) -> Tensor:
        """View `codes` i32 [rows, words] in the dtype that marks their kind: i32 for integers, float8_e4m3fn [rows,
        4·words] for FP8, uint8 [rows, 4·words] for FP4."""
        if not self.floats:
            return codes
        return codes.view(torch.uint8 if self.bits == 4 else torch.float8_e4m3fn)

    def numbers(self, scales: Tensor) -> Tensor:
        """Return `scales` as kernels read them: nvfp4's bytes viewed as float8_e4m3fn, all other scales unchanged."""
        return scales.view(self.kind) if self.tensor_scales is not None else scales

    def linear(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b, x [..., in] → [..., out]; a kernel computes it for up to 64 rows on a GPU."""
        return norm_linear(x, self.blocks(), self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        buffers = dict(self.named_buffers())
        super()._apply(fn, recurse)
        restore(self, buffers)
        return self


class QuantizedLinear(Quantized):
    """A linear layer y = x Wᵀ + b with packed weights."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, **layout: Any) -> None:
        super().__init__(inputs, outputs, **layout)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class QuantizedEmbedding(Quantized):
    """An embedding with a packed table W: ids [...] → rows of W [..., width], in f32."""

    def __init__(self, rows: int, width: int, **layout: Any) -> None:
        super().__init__(width, rows, **layout)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.flatten()
        offsets = self.offsets if self.tensor_scales is None else self.tensor_scales
        offsets = None if offsets is None else offsets[:, n]
        scales = self.numbers(self.scales[:, n])
        rows = dequantize_rows(self.bit_cast(self.codes[n]), scales, offsets, self.bits, self.width)
        return rows.view(*ids.shape, -1)

"""x Wᵀ on a CPU with quantized W, which is packed once for PyTorch's own CPU kernels.

| x | W is packed as | and rounded to | for |
|---|---|---|---|
| bf16 | 4-bit codes, scales and offsets: `CodePlanes` | exact codes, scales and offsets in bf16 | few rows of x |
| f16 | f16 values: `HalfPrecision` | f16 | any number of rows |
| f32 | two f16 values per weight: `HalfPrecision` | 22 bits; most layouts need fewer | few rows of x |

The 4-bit operator also takes x in f32 and f16, but is vectorized only for bf16: in f32 one row takes five times as long
as with a W of f32. FBGEMM's f32 × f16 product widens W in registers and sums in f32, and one row is limited by reading
W. Packed weights are kept in addition to the codes, which embeddings look up and state_dicts hold. Their layout depends
on the instructions of the CPU, so they are never stored in files.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from typing import Any

import torch
from torch.nn import functional as F

from ..shared.operands import requires_grad
from ..shared.quantized_gemv import Codes, dequantize, unpack

GROUPS = (256, 128, 64, 32)  # group sizes that the 4-bit operator supports
MULTIPLE = 16  # the 4-bit operator needs a multiple of this many rows of W
# Rows of x by its dtype and the bits of codes: for more rows it is faster to dequantize W and use a dense product.
# Measured with W [3072, 576] and [576, 1536]: times cross at 80 rows of bf16 for 4 bits and at 35 for 8, at 65 rows of
# f32, for which two f16 values are read, and never for f16, whose dense products are slow on CPUs.
MOST_ROWS = {(torch.bfloat16, 4): 64, (torch.bfloat16, 8): 32, (torch.float32, 4): 64, (torch.float32, 8): 64}
# A first product of more rows does not pack W: it may be a prompt, and the decode step after it may use a fused weight,
# which it then packs.
FEW_ROWS = 8
SHARE = 0.25  # of the machine's memory that packed weights take at most
AT_ONCE = 1 << 22  # codes unpacked at a time
LOW = 2.0**-11  # factor of the second of two f16 values: the rounding error of the first is at most this share of it
# id of codes -> (a weak reference to them, {dtype of x: (stamp of the packed tensors, the packed form)}). Not a
# WeakKeyDictionary: its look-up takes microseconds, and a decode step does one for every product.
_packed: dict[int, tuple[weakref.ref[torch.Tensor], dict[torch.dtype, tuple[Any, Any]]]] = {}


class CodePlanes:
    """W as 4-bit codes with a scale and an offset per group, in bf16. An 8-bit code, 16 · high + low, is in two planes
    of 4-bit codes, concatenated along the columns: scale · (code − 128) + offset is the sum of 16 scale · (high − 8)
    and scale · (low − 8) + 8 scale + offset, so x is multiplied by both planes in one sum. The offset of the low plane
    is rounded to bf16; its rounding error is the offset of the high plane."""

    def __init__(self, weight: Codes) -> None:
        codes, scales, offsets = weight.parts
        self.rows, self.planes = len(codes), weight.bits // 4
        self.padding = -weight.width % GROUPS[-1]  # not 0 only if one group is the full row
        width = weight.width + self.padding
        group = width if len(scales) == 1 else weight.group
        self.group = next(g for g in GROUPS if group % g == 0)
        offsets = torch.zeros_like(scales) if offsets is None else offsets
        scales, zeros = (part.float().repeat_interleave(group // self.group, 0) for part in (scales, offsets))
        if self.planes == 2:
            zeros = zeros + 8 * scales
            rounded = zeros.bfloat16()
            scales, zeros = torch.cat((16 * scales, scales)), torch.cat((zeros - rounded.float(), zeros))
        pairs = torch.stack((scales, zeros), -1)
        padding = -self.rows % MULTIPLE
        self.scales_and_zeros = F.pad(pairs, (0, 0, 0, padding)).bfloat16().contiguous()
        # Rows are packed block by block, in multiples of 256, which the blocks of every CPU's packed layout divide.
        step = max(256, AT_ONCE // width // 256 * 256)
        blocks = [self._block(codes[first : first + step], weight, width) for first in range(0, self.rows, step)]
        self.codes = torch.cat(blocks)
        self.nbytes = self.codes.nbytes + self.scales_and_zeros.nbytes

    def _block(self, codes: torch.Tensor, weight: Codes, width: int) -> torch.Tensor:
        """Return `codes`, some rows of `weight`, in the layout of the 4-bit operator, padded to `width` columns."""
        numbers = unpack(codes, weight.bits, weight.width)
        if self.planes == 2:
            numbers = torch.stack((numbers >> 4, numbers & 15), 1)
        numbers = F.pad(numbers, (0, width - weight.width)).flatten(1)
        numbers = F.pad(numbers, (0, 0, 0, -len(numbers) % MULTIPLE))
        packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
        return packed

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ for x [rows, in], bf16."""
        if self.padding:
            x = F.pad(x, (0, self.padding))
        x = torch.cat((x, x), 1) if self.planes == 2 else x.contiguous()
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.codes, self.group, self.scales_and_zeros)
        return y if self.codes.shape[0] == self.rows else y[:, : self.rows]


class HalfPrecision:
    """W dequantized to f16; or, if `exact`, to pairs of f16 values h and l, so that h + 2^{−11} l is W to 22 bits. W is
    first scaled by a power of 2, so that its largest value is far from overflow and underflow in f16."""

    def __init__(self, weight: Codes, exact: bool) -> None:
        self.rows = len(weight)
        numbers = torch.empty((1 + exact) * self.rows, weight.width)
        step = max(1, AT_ONCE // weight.width)
        for first in range(0, self.rows, step):
            part = weight.rows(slice(first, first + step))
            numbers[first : first + step][: len(part)] = dequantize(*part.parts, bits=part.bits, width=part.width)
        full_rows, rest = numbers[: self.rows], numbers[self.rows :]
        self.factor = 2.0 ** (math.frexp(float(full_rows.abs().max()))[1] - 12)
        full_rows /= self.factor
        if exact:
            torch.sub(full_rows, full_rows.half(), out=rest).div_(LOW)
        self.numbers: Any = torch.ops.quantized.linear_prepack_fp16(numbers, None)
        self.exact, self.nbytes = exact, 2 * numbers.numel()

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ for x [rows, in], f32 or f16."""
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self.numbers)
        if self.exact:
            y = torch.add(y[:, : self.rows], y[:, self.rows :], alpha=LOW)
        return y.mul_(self.factor).to(x.dtype)


def packed_linear(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, bits: int
) -> torch.Tensor | None:
    """Return x Wᵀ with packed weights, x [..., in] → [..., out]. W is given by the fields of its `Codes`; it is packed
    once per dtype of x, and again if it changes. Return None where the caller has to dequantize W: on a GPU, for FP8 or
    FP4, for no rows or more than MOST_ROWS, if the first product with W has more than FEW_ROWS rows, if gradients are
    needed, while torch compiles, if `refusal` gives a reason for x's dtype, or if `_pack` returns None."""
    if codes.device.type != "cpu" or torch.compiler.is_compiling() or type(codes) is not torch.Tensor:
        return None
    if codes.dtype != torch.int32 or refusal(x.dtype) is not None or requires_grad(x, scales, offsets):
        return None
    *lead, width = x.shape
    rows = x.numel() // width
    if not 0 < rows <= MOST_ROWS.get((x.dtype, bits), rows) or codes.numel() == 0:
        return None
    parts = codes, scales, offsets
    stamp = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in parts if p is not None]
    key = id(codes)
    reference, forms = _packed.get(key, (None, {}))
    if reference is None or reference() is not codes:
        forms = {}
        _packed[key] = weakref.ref(codes, functools.partial(_forget, key)), forms
    old, form = forms.get(x.dtype, (None, None))
    if old != stamp or form is None:
        if old != stamp and rows > FEW_ROWS:
            forms[x.dtype] = stamp, None
            return None
        form = _pack(Codes(*parts, bits, width), x.dtype)
        if form is None:
            return None
        forms[x.dtype] = stamp, form
    y: torch.Tensor = form.linear(x.reshape(-1, width))
    return y.view(*lead, codes.shape[0])


def _forget(key: int, reference: weakref.ref[torch.Tensor]) -> None:
    """Free the packed form of codes that were garbage collected, unless new codes already reuse their id."""
    if key in _packed and _packed[key][0] is reference:
        del _packed[key]


@functools.cache
def refusal(dtype: torch.dtype) -> str | None:
    """Return the reason why this CPU cannot multiply x of `dtype` by packed weights; None if it can."""
    if dtype == torch.bfloat16:
        if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
            return "the operator for 4-bit weights is not vectorized for this CPU"
        has_kernel = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
        return None if has_kernel else "this PyTorch has no operator for 4-bit weights"
    if dtype not in (torch.float32, torch.float16):
        return f"weights are not packed for {dtype}"
    # PyTorch has no query for this, and engines for other processors raise: so a small weight is packed as a trial.
    try:
        torch.ops.quantized.linear_prepack_fp16(torch.zeros(16, 16), None)
    except (RuntimeError, AttributeError) as error:
        return str(error).partition("\n")[0]
    return None


def _pack(weight: Codes, dtype: torch.dtype) -> CodePlanes | HalfPrecision | None:
    """Return `weight` packed for x of `dtype`; None if packed weights would take more than their share of memory, or if
    scales are not finite, which f16 would hide."""
    kind = CodePlanes if dtype == torch.bfloat16 else HalfPrecision
    exact = dtype == torch.float32
    size = len(weight) * weight.width * (weight.bits // 8 + 1 if kind is CodePlanes else 2 + 2 * exact)
    total = sum(form.nbytes for _, forms in _packed.values() for _, form in forms.values() if form is not None)
    if total + size > memory() * SHARE or not all(bool(p.isfinite().all()) for p in weight.parts[1:] if p is not None):
        return None
    with torch.no_grad():
        return CodePlanes(weight) if kind is CodePlanes else HalfPrecision(weight, exact)


@functools.cache
def memory() -> int:
    """Return the bytes of memory of this machine, or 2^60 if the system does not report them."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 60

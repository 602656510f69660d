"""x Wᵀ on a CPU with W in codes, packed once by PyTorch for its own kernels, and read by them where it lies.

| x | W is packed as | and rounded to | for |
|---|---|---|---|
| bf16 | 4-bit codes, scales and offsets: `CodePlanes` | exact codes, scales and offsets in bf16 | few rows of x |
| f16 | numbers in f16: `HalfNumbers` | f16 | any number of rows |
| f32 | two numbers in f16 for each: `HalfNumbers` | 22 bits; most layouts need fewer | few rows of x |

The operator for 4 bits takes x in f32 and f16 too, but is vectorized for bf16 alone: in f32 one row takes five times as
long as with a W of f32. FBGEMM's product of f32 by f16 numbers widens W in registers and sums in f32, and one row is as
fast as W is read. Packed weights stay beside the codes, which embeddings look up and state_dicts hold. Their layout
depends on the instructions of the CPU, so they are never stored.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from typing import Any

import torch
from torch.nn import functional as F

from ..shared.codes import Codes, dequantize, unpack
from ..shared.operands import learns

GROUPS = (256, 128, 64, 32)  # that the operator for 4 bits takes
MULTIPLE = 16  # of rows of W that it takes
# Of x, by its dtype and the bits of codes: for more rows it is faster to dequantize W, and multiply numbers. Measured
# with W [3072, 576] and [576, 1536]: times cross at 80 rows of bf16 for 4 bits and at 35 for 8, at 65 rows of f32, for
# which two f16 numbers are read, and never for f16, whose own products are slow on CPUs.
MOST_ROWS = {
    (torch.bfloat16, 4): 64,
    (torch.bfloat16, 8): 32,
    (torch.float32, 4): 64,
    (torch.float32, 8): 64,
}
# The first product of more rows packs nothing: it may be a prompt that a module reads whose weights a decode step then
# packs with those of others.
FEW_ROWS = 8
SHARE = 0.25  # of the memory that packed weights take at most
AT_ONCE = 1 << 22  # codes unpacked at a time
LOW = 2.0**-11  # by which the second of two f16 numbers counts: what the first leaves off is at most that much of it
# id of codes -> (a reference to them, {dtype of x: (what was packed, the packed form)}). To look up a weak key takes
# microseconds, and a step does so for every product.
_packed: dict[int, tuple[weakref.ref[torch.Tensor], dict[torch.dtype, tuple[Any, Any]]]] = {}


class CodePlanes:
    """W as planes of 4-bit codes side by side along the columns, with a scale and an offset for each group, in bf16.

    A code of 8 bits is 16 · high + low: scale · (code − 128) + offset is the sum of 16 scale · (high − 8) and
    scale · (low − 8) + 8 scale + offset, so x is multiplied by both planes in one sum. The offset of the low plane
    is rounded, and what that leaves off is the offset of the high one.
    """

    def __init__(self, weight: Codes) -> None:
        codes, scales, offsets = weight.parts
        self.rows, self.planes = len(codes), weight.bits // 4
        self.padding = -weight.width % GROUPS[-1]  # of one group as long as a row
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
        more = -self.rows % MULTIPLE
        self.scales_and_zeros = F.pad(pairs, (0, 0, 0, more)).bfloat16().contiguous()
        # Blocks of rows are packed one after the other, by multiples of what any CPU has in a block.
        step = max(256, AT_ONCE // width // 256 * 256)
        blocks = [self._block(codes[first : first + step], weight, width) for first in range(0, self.rows, step)]
        self.codes = torch.cat(blocks)
        self.nbytes = self.codes.nbytes + self.scales_and_zeros.nbytes

    def _block(self, codes: torch.Tensor, weight: Codes, width: int) -> torch.Tensor:
        """Some rows of W as the operator reads them."""
        numbers = unpack(codes, weight.bits, weight.width)
        if self.planes == 2:
            numbers = torch.stack((numbers >> 4, numbers & 15), 1)
        numbers = F.pad(numbers, (0, width - weight.width)).flatten(1)
        numbers = F.pad(numbers, (0, 0, 0, -len(numbers) % MULTIPLE))
        packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
        return packed

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """x Wᵀ of x [rows, in], bf16."""
        if self.padding:
            x = F.pad(x, (0, self.padding))
        x = torch.cat((x, x), 1) if self.planes == 2 else x.contiguous()
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.codes, self.group, self.scales_and_zeros)
        return y if self.codes.shape[0] == self.rows else y[:, : self.rows]


class HalfNumbers:
    """W as numbers in f16; or, `exact`, as the sums of two: of W rounded, and 2^{−11} of what that leaves off.

    All are first scaled by a power of 2, so that the largest is far from the largest and the smallest of f16.
    """

    def __init__(self, weight: Codes, exact: bool) -> None:
        self.rows = len(weight)
        numbers = torch.empty((1 + exact) * self.rows, weight.width)
        step = max(1, AT_ONCE // weight.width)
        for first in range(0, self.rows, step):
            part = weight.rows(slice(first, first + step))
            numbers[first : first + step][: len(part)] = dequantize(*part.parts, bits=part.bits, width=part.width)
        whole, rest = numbers[: self.rows], numbers[self.rows :]
        self.factor = 2.0 ** (math.frexp(float(whole.abs().max()))[1] - 12)
        whole /= self.factor
        if exact:
            torch.sub(whole, whole.half(), out=rest).div_(LOW)
        self.numbers: Any = torch.ops.quantized.linear_prepack_fp16(numbers, None)
        self.exact, self.nbytes = exact, 2 * numbers.numel()

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """x Wᵀ of x [rows, in], f32 or f16."""
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self.numbers)
        if self.exact:
            y = torch.add(y[:, : self.rows], y[:, self.rows :], alpha=LOW)
        return y.mul_(self.factor).to(x.dtype)


def packed_linear(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, bits: int
) -> torch.Tensor | None:
    """x Wᵀ with the W of these parts of `Codes`, x [..., in] → [..., out]; None where W is to be dequantized for it: on
    a GPU, for many rows, where gradients are wanted, while models are compiled, or if memory is short."""
    if codes.device.type != "cpu" or torch.compiler.is_compiling() or type(codes) is not torch.Tensor:
        return None
    if codes.dtype != torch.int32 or refusal(x.dtype) is not None or learns(x, scales, offsets):
        return None
    *lead, width = x.shape
    rows = x.numel() // width
    if not 0 < rows <= MOST_ROWS.get((x.dtype, bits), rows) or codes.numel() == 0:
        return None
    parts = codes, scales, offsets
    stamp = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in parts if p is not None]
    key = id(codes)
    reference, known = _packed.get(key, (None, {}))
    if reference is None or reference() is not codes:
        known = {}
        _packed[key] = weakref.ref(codes, functools.partial(_forget, key)), known
    old, form = known.get(x.dtype, (None, None))
    if old != stamp or form is None:
        if old != stamp and rows > FEW_ROWS:
            known[x.dtype] = stamp, None
            return None
        form = _pack(Codes(*parts, bits, width), x.dtype)
        if form is None:
            return None
        known[x.dtype] = stamp, form
    y: torch.Tensor = form.linear(x.reshape(-1, width))
    return y.view(*lead, codes.shape[0])


def _forget(key: int, reference: weakref.ref[torch.Tensor]) -> None:
    """Free what was packed of codes that are gone; others may have their id by now."""
    if key in _packed and _packed[key][0] is reference:
        del _packed[key]


@functools.cache
def refusal(dtype: torch.dtype) -> str | None:
    """Return why this CPU does not multiply x of `dtype` by packed weights; None if it does."""
    if dtype == torch.bfloat16:
        if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
            return "the operator for 4 bits is not vectorized for this CPU"
        known = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
        return None if known else "this PyTorch has no operator for 4 bits"
    if dtype not in (torch.float32, torch.float16):
        return f"no packed weights are for {dtype}"
    # PyTorch has no question for this, and engines for other processors raise: so a small weight is packed, once.
    try:
        torch.ops.quantized.linear_prepack_fp16(torch.zeros(16, 16), None)
    except (RuntimeError, AttributeError) as error:
        return str(error).partition("\n")[0]
    return None


def _pack(weight: Codes, dtype: torch.dtype) -> CodePlanes | HalfNumbers | None:
    """`weight` in the layout for x of `dtype`; None if packed weights would then take more memory than they may, or if
    it is not finite, which numbers in f16 would hide."""
    kind = CodePlanes if dtype == torch.bfloat16 else HalfNumbers
    exact = dtype == torch.float32
    size = len(weight) * weight.width * (weight.bits // 8 + 1 if kind is CodePlanes else 2 + 2 * exact)
    taken = sum(form.nbytes for _, known in _packed.values() for _, form in known.values() if form is not None)
    if taken + size > memory() * SHARE or not all(bool(p.isfinite().all()) for p in weight.parts[1:] if p is not None):
        return None
    with torch.no_grad():
        return CodePlanes(weight) if kind is CodePlanes else HalfNumbers(weight, exact)


@functools.cache
def memory() -> int:
    """Return the bytes of memory of this machine; of one that does not tell, more than any has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 60

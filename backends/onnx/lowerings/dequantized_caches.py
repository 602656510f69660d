"""Quantization and dequantization of caches by standard operators, for attentions without a kernel that reads codes.

Two 4-bit codes share a byte: channel 2i of a head is in the low half, channel 2i + 1 in the high half, each plus 8.
This is the packing of GroupQueryAttention.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as onnx

from weft.ir.graph import Value
from weft.ir.ops.caches import get_code_range
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType

from ..onnx_emitter import OnnxEmitter

Out = onnx.Value


def quantize_cache(e: OnnxEmitter, x: Value, scale: Value, heads: int, bits: int) -> Out:
    """Return the codes round(x / scale), clipped to the range of `bits`, of x [batch, seq, heads · width]: i8 [batch,
    heads, seq, width], or for 4 bits u8 [.., width / 2]. `scale` is [heads · width] or [1]."""
    low, high = get_code_range(bits)
    rounded = e.op("Round", e.op("Div", e.cast(e[x], dtypes.f32), e[scale]))
    rounded = e.op("Clip", rounded, _new_f32(e, low), _new_f32(e, high))
    by_head = e.op("Reshape", rounded, e.constant([0, 0, heads, x.width // heads]))
    quantized = e.op("Transpose", by_head, perm=[0, 2, 1, 3])
    return e.cast(quantized, dtypes.i8) if bits == 8 else pack_codes(e, quantized)


def dequantize_cache(e: OnnxEmitter, cached: Out, scale: Value, heads: int, bits: int, dtype: DType) -> Out:
    """Return the codes `cached` [batch, heads, slots, width, or width / 2 for 4 bits] times `scale`, [heads · width] or
    [1], in `dtype`."""
    values = e.cast(cached, dtypes.f32) if bits == 8 else unpack_codes(e, cached)
    scales = e[scale] if scale.shape == (1,) else e.op("Reshape", e[scale], e.constant([1, heads, 1, -1]))
    return e.cast(e.op("Mul", values, scales), dtype)


def pack_codes(e: OnnxEmitter, x: Out) -> Out:
    """Return x [.., n], f32 with integers from −8 to 7, packed two per byte: u8 [.., n / 2]."""
    halves = (e.op("Slice", x, *(e.constant([n]) for n in (first, 2**31 - 1, -1, 2))) for first in (0, 1))
    lower, upper = (e.op("Add", half, _new_f32(e, -get_code_range(4)[0])) for half in halves)
    return e.cast(e.op("Add", lower, e.op("Mul", upper, _new_f32(e, 16))), dtypes.u8)


def unpack_codes(e: OnnxEmitter, cached: Out, rank: int = 4) -> Out:
    """Return the 4-bit integers in the bytes `cached` [.., n / 2], a tensor of `rank` axes, as f32 [.., n]."""
    bytes_f32 = e.cast(cached, dtypes.f32)
    upper = e.op("Floor", e.op("Mul", bytes_f32, _new_f32(e, 1 / 16)))
    lower = e.op("Sub", bytes_f32, e.op("Mul", upper, _new_f32(e, 16)))
    pair = e.op("Concat", *(e.op("Unsqueeze", x, e.constant([rank])) for x in (lower, upper)), axis=rank)
    return e.op("Add", e.op("Reshape", pair, e.constant([0] * (rank - 1) + [-1])), _new_f32(e, get_code_range(4)[0]))


def _new_f32(e: OnnxEmitter, x: float) -> Out:
    return e.constant(x, np.float32)

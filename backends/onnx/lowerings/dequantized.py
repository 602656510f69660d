"""Products and lookups with quantized weights in standard operators: codes, DequantizeLinear by groups, MatMul; and KV
caches of integers.

A runtime that fuses DequantizeLinear with MatMul multiplies by the codes. ONNX Runtime does this for weights in the
layout [in, out], on a CPU with activations rounded to 8 bits (its session key
``session.qdq_matmulnbits_accuracy_level``). Other runtimes dequantize the weights and multiply.

A lookup is fastest in a table [rows, width]. From the layout of a product, [width, rows], it gathers columns byte by
byte, which costs a prefill of 1,000 tokens a few milliseconds:

| table | codes in the file |
|---|---|
| only a table, 8 bits | [rows, width], gathered along axis 0 |
| only a table, up to 4 bits | [rows, width], two per byte: Gather does not support 4-bit integers; bytes are unpacked |
| also an output head, 8 bits | once, [width, rows], gathered along axis 1 |
| also an output head, up to 4 bits | once in each layout: together as large as 8-bit codes |

Weights of experts are stacks of matrices: slices for experts in use are gathered, then dequantized without fusion.

Before opset 21, which has blocks in DequantizeLinear and 4-bit integers, codes are subtracted and multiplied instead:
the file is as small, and most runtimes compute the weights when they load it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as onnx

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.ir.ops.caches import get_code_range
from weft.ir.recipes import Permute, Recipe, Slice
from weft.ir.recipes.blocks import Stored
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BlockLayout
from weft.ir.types.dtypes import DType

from ...block_weights import find_stored_layout, get_quantized
from ...onnx_runtimes import BLOCKS, GATHERED_CODES
from ...target import Backend
from ..lowering import decodes, lowering
from ..onnx_emitter import OnnxEmitter, emit_once
from .block_matmul import append_sums, decode_scales
from .layers import add_bias, apply_norm, find_norm_opset, find_norm_refusal, make_norm_key
from .moe import gather_experts

Out = onnx.Value
SINCE = 21  # first opset where DequantizeLinear supports groups
ZEROS = ("signed_zeros", "middles")  # parts that layouts without zero points lack


def has_blocks(target: Backend) -> bool:
    """Return whether DequantizeLinear decodes blocks on `target`."""
    return target.opset >= SINCE and BLOCKS not in getattr(target, "lacks", ())


def _decodes_blocks(target: Backend, weight: Param, layout: BlockLayout) -> bool:
    """Return whether DequantizeLinear decodes `weight` on `target`; OpenVINO decodes no partial block at its end."""
    return has_blocks(target) and (_gathers_codes(target) or not weight.width % layout.group)


def _gathers_codes(target: Backend) -> bool:
    """Return whether DequantizeLinear decodes codes that a node chose on `target`; else it needs a constant."""
    return GATHERED_CODES not in getattr(target, "lacks", ())


def find_layout(weight: Value | None, target: Backend) -> BlockLayout | str:
    """Return the block layout in which operators of `target` decode `weight`, a matrix or a stack of matrices, or the
    reason (str) why they cannot."""
    layout = find_stored_layout(weight)
    if isinstance(layout, str):
        return layout
    assert isinstance(weight, Param)
    if layout.floats or (layout.has_minimum and not layout.sums):
        return f"DequantizeLinear cannot decode {layout}{', but target torch can' * layout.floats}"
    if layout.sums and not has_blocks(target):
        return f"without blocks in DequantizeLinear operators cannot decode {layout}"
    if weight.type.dtype not in (dtypes.f32, dtypes.f16):
        return f"no kernel of ONNX Runtime dequantizes to {weight.type.dtype}"
    return layout


def _find_product_refusal(node: Node, target: Backend) -> str | None:
    layout = find_layout(node.operand("weight"), target)
    return layout if isinstance(layout, str) else None


def _find_norm_refusal(node: Node, target: Backend) -> str | None:
    return find_norm_refusal(node, target) or _find_product_refusal(node, target)


def _find_lookup_refusal(node: Node, target: Backend) -> str | None:
    layout = find_layout(node.operand("table"), target)
    if isinstance(layout, BlockLayout) and layout.sums:
        return f"a lookup cannot decode {layout}"
    return layout if isinstance(layout, str) else None


@lowering(ops.linear, targets=decodes, when=_find_product_refusal, first=True)
def DequantizeMatMul(e: OnnxEmitter, node: Node) -> Out:
    return add_bias(e, _multiply_codes(e, node.required_operand("x"), e[node.required_operand("x")], node), node)


@lowering(ops.norm_linear, targets=decodes, when=_find_norm_refusal, first=True, opset=find_norm_opset)
def NormDequantizeMatMul(e: OnnxEmitter, node: Node) -> Out:
    return add_bias(e, _multiply_codes(e, make_norm_key(node), apply_norm(e, node), node), node)


@lowering(ops.embedding, targets=decodes, when=_find_lookup_refusal, first=True)
def GatherDequantize(e: OnnxEmitter, node: Node) -> Out:
    ids, (table, layout) = node.required_operand("ids"), get_quantized(node, "table")
    if not _decodes_blocks(e.target, table, layout):
        return _decode_rows(e, table, layout, ids.type.rank + 1, lambda name: _gather_part(e, ids, table, layout, name))
    if not _gathers_codes(e.target):
        return e.op("Gather", _dequantize_rows(e, table, layout), e[ids], axis=0)
    if layout.bits == 8:
        axis = int(any(user.op in (ops.linear, ops.norm_linear) for user in table.users))
        names = ("signed", "steps", "signed_zeros")
        codes, scales, zeros = (_gather_part(e, ids, table, layout, name, axis) for name in names)
        rows = _dequantize(e, codes, scales, zeros, layout, -1 if axis == 0 else 0)
        return e.op("Transpose", rows, perm=[*range(1, ids.type.rank + 1), 0]) if axis else rows
    pairs, scales, zeros = (_gather_part(e, ids, table, layout, name) for name in ("halves", "steps", "middles"))
    return _dequantize_nibbles(e, pairs, scales, zeros, table, layout)


def _dequantize_rows(e: OnnxEmitter, table: Param, layout: BlockLayout) -> Out:
    codes, steps, zeros = (_emit_part(e, table, layout, n, 0, "table") for n in ("signed", "steps", "signed_zeros"))
    scales = _cast_scales(e, table, layout, steps, "steps")
    return _drop_padding(e, _dequantize(e, codes, scales, zeros, layout, -1), table, layout)


def _dequantize_nibbles(
    e: OnnxEmitter, pairs: Out | None, scales: Out | None, zeros: Out | None, weight: Param, layout: BlockLayout
) -> Out:
    """Return rows of `weight`, dequantized from codes of up to 4 bits: byte i of `pairs` [..., n] has code i in its low
    half and code i + n in its high half."""
    four, fifteen = (e.constant(number, dtypes.u8.numpy) for number in (4, 15))
    low, high = e.op("BitwiseAnd", pairs, fifteen), e.op("BitShift", pairs, four, direction="RIGHT")
    codes = e.op("Concat", low, high, axis=-1)
    if zeros is None:
        zeros = e.op("Expand", e.constant(layout.middle, dtypes.u8.numpy), e.op("Shape", scales))
    return _drop_padding(e, _dequantize(e, codes, scales, zeros, layout, -1), weight, layout)


def _decode_rows(
    e: OnnxEmitter, weight: Param, layout: BlockLayout, rank: int, read: Callable[[str], Out | None]
) -> Out:
    """Return rows of `weight`, a tensor of `rank` axes, as (codes − zero points) · scales in arithmetic of opset 17.
    `read` returns a part (codes, scales, zero points or None) of these rows by its name."""
    dtype = weight.type.dtype
    if layout.bits == 8:
        codes, zeros = e.cast(read("signed"), dtype), read("signed_zeros")
    else:  # the halves of a byte are the codes i and i + n
        pairs, zeros = e.cast(read("halves"), dtype), read("middles")
        high = e.op("Floor", e.op("Mul", pairs, e.scalar(1 / 16, dtype)))
        codes = e.op("Concat", e.op("Sub", pairs, e.op("Mul", high, e.scalar(16, dtype))), high, axis=-1)
    scales, last = _cast_scales(e, weight, layout, read("steps"), "steps"), e.constant([-1])
    blocks = e.op("Reshape", codes, e.constant([0] * (rank - 1) + [-1, layout.group]))
    if zeros is not None:
        blocks = e.op("Sub", blocks, e.op("Unsqueeze", e.cast(zeros, dtype), last))
    elif layout.bits < 8:
        blocks = e.op("Sub", blocks, e.scalar(layout.middle, dtype))
    values = e.op("Mul", blocks, e.op("Unsqueeze", scales, last))
    return _drop_padding(e, e.op("Reshape", values, e.constant([0] * (rank - 1) + [-1])), weight, layout)


def _drop_padding(e: OnnxEmitter, rows: Out, weight: Param, layout: BlockLayout) -> Out:
    if weight.width % layout.group == 0:
        return rows
    return e.op("Slice", rows, e.constant([0]), e.constant([weight.width]), e.constant([-1]))


def dequantize_stack(e: OnnxEmitter, weight: Param, chosen: Out | None) -> Out:
    """Return the dequantized matrices of the stack `weight` [experts, out, in] at the indices `chosen` (None: all)."""
    layout = find_layout(weight, e.target)
    assert isinstance(layout, BlockLayout)

    if chosen is not None and _decodes_blocks(e.target, weight, layout) and not _gathers_codes(e.target):
        return gather_experts(e, dequantize_stack(e, weight, None), chosen)

    def read(name: str) -> Out | None:
        if name in ZEROS and not layout.has_zeros:
            return None
        dtype = _choose_part_dtype(layout, name)
        return gather_experts(e, e.weight(f"{weight.name}.{name}", Stored(weight.recipe, name), dtype), chosen)

    if not _decodes_blocks(e.target, weight, layout):
        return _decode_rows(e, weight, layout, 3, read)
    scales = _cast_scales(e, weight, layout, read("steps"), "steps")
    if layout.bits < 8 and chosen is not None:  # Gather does not support 4-bit integers
        return _dequantize_nibbles(e, read("halves"), scales, read("middles"), weight, layout)
    values = _dequantize(e, read("signed"), scales, read("signed_zeros"), layout, -1)
    return _drop_padding(e, values, weight, layout)


def _multiply_codes(e: OnnxEmitter, key: object, x: Out, node: Node) -> Out:
    """Emit x Wᵀ for the weight W of `node`, stored as codes [in, out]. `key` identifies x: equal keys share nodes."""
    weight, layout = get_quantized(node)
    if layout.sums:
        x = append_sums(e, key, x, node.required_operand("x").type.rank, weight.width, layout.group)
    return e.op("MatMul", x, _dequantize_matrix(e, weight, layout))


@emit_once
def _dequantize_matrix(e: OnnxEmitter, weight: Param, layout: BlockLayout) -> Out:
    if not _decodes_blocks(e.target, weight, layout):
        rows = _decode_rows(e, weight, layout, 2, lambda name: _emit_part(e, weight, layout, name, 0))
        return e.op("Transpose", rows, perm=[1, 0])
    codes, zeros = (_emit_part(e, weight, layout, name, 1) for name in ("signed", "signed_zeros"))
    if layout.sums:
        scales: Out | None = decode_scales(e, weight, transposed=True)
    else:
        scales = _cast_scales(e, weight, layout, _emit_part(e, weight, layout, "steps", 1), "steps")
    return _dequantize(e, codes, scales, zeros, layout, 0)


def _dequantize(
    e: OnnxEmitter, codes: Out | None, scales: Out | None, zeros: Out | None, layout: BlockLayout, axis: int
) -> Out:
    return e.op("DequantizeLinear", codes, scales, zeros, axis=axis, block_size=layout.group)


def _gather_part(e: OnnxEmitter, ids: Value, table: Param, layout: BlockLayout, name: str, axis: int = 0) -> Out | None:
    """Return the part `name` (codes, scales or zero points) of the rows `ids` [...] of `table`: [..., elements of a
    row], or with `axis` 1 [elements of a row, ...]. Return None for zero points if the table has none."""
    part = _emit_part(e, table, layout, name, axis, "table")
    if e.target.decodes:  # ONNX Runtime folds the cast: GPUs may lack f16
        part = _cast_scales(e, table, layout, part, name)
        return None if part is None else e.op("Gather", part, e[ids], axis=axis)
    return None if part is None else _cast_scales(e, table, layout, e.op("Gather", part, e[ids], axis=axis), name)


def _emit_part(
    e: OnnxEmitter, weight: Param, layout: BlockLayout, name: str, transposed: int, role: str = ""
) -> Out | None:
    """Return the initializer of the part `name` (codes, scales or zero points) of `weight`, transposed if `transposed`
    is 1; None for zero points if the weight has none. A table that is also an output head has separate initializers for
    each `role`, with the same bytes in the file: ONNX Runtime does not fuse nodes that read a shared initializer."""
    if name in ZEROS and not layout.has_zeros:
        return None
    recipe: Recipe = Stored(weight.recipe, name)
    row_size = weight.width + layout.sums * -(-weight.width // layout.group)
    if name == "signed" and row_size % layout.group and _decodes_blocks(e.target, weight, layout):
        recipe = Slice(recipe, 1, 0, row_size)
    if transposed:
        recipe = Permute(recipe, (1, 0))
    label = f"{weight.name}.{name}{'.T' * transposed}{'.rows' * bool(role)}"
    return e.weight(label, recipe, _choose_part_dtype(layout, name), role)


def _choose_part_dtype(layout: BlockLayout, name: str) -> DType:
    if name == "steps":
        return _choose_scale_dtype(layout)
    return dtypes.u8 if name in ("halves", "middles") else dtypes.i8 if layout.bits == 8 else dtypes.i4


def _cast_scales(e: OnnxEmitter, weight: Param, layout: BlockLayout, part: Out | None, name: str) -> Out | None:
    """Return `part`; scales ("steps") stored in another dtype, as f16 takes half the bytes, are cast."""
    if name != "steps" or _choose_scale_dtype(layout) == weight.type.dtype:
        return part
    return e.cast(part, weight.type.dtype)


def _choose_scale_dtype(layout: BlockLayout) -> DType:
    return layout.scale if layout.scale in (dtypes.f16, dtypes.f32) else dtypes.f32


# -- KV caches of integers


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

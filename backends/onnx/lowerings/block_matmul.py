"""Products and lookups with weights that stay in quantized blocks, by ONNX Runtime's own operators.

MatMulNBits multiplies by codes of 2, 4 or 8 bits with zero points of the same width. Its accuracy level determines the
rounding of activations:

- Weights that a pass quantized use level 4 on a CPU: activations are rounded to 8-bit integers, group by group. Level 0
  is ten to a hundred times slower for 2 and 8 bits, and every level is as slow with floating-point zero points.
- Blocks of a checkpoint (--keep-blocks) use level 0: sums in f32, so results equal those of dequantized weights. An
  8-bit code is then computed as two 4-bit codes.

The minimum of a q4_1 block is not a multiple of its scale, so it does not fit a 4-bit zero point. The rest, an offset
per block, is multiplied by the sum of the activations over the block: in a second, thin product if offsets are floats,
or by appending these sums to the activations if they are quantized (`BlockLayout.sums`).
"""

from __future__ import annotations

import onnx_ir as onnx

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.ir.recipes import Permute, Recipe, Reshape
from weft.ir.recipes.blocks import Stored, compute_part_widths
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import LARGEST, BlockLayout
from weft.ir.types.dtypes import DType

from ...block_weights import NOT_ASKED, find_stored_layout, get_quantized, is_exact, is_quantized
from ...target import Backend
from ..lowering import lowering, multiplies_codes
from ..onnx_emitter import OnnxEmitter
from .layers import MS, add_bias, apply_norm, find_norm_refusal, make_norm_key

GROUPS = (16, 32, 64, 128, 256)  # group sizes that MatMulNBits supports
NATIVE = (2, 4, 8)  # widths of its codes, in bits
Parts = tuple[onnx.Value, onnx.Value, onnx.Value | None]  # codes, scales, zero points


def find_layout(weight: Value | None, target: Backend) -> BlockLayout | str:
    """Return the block layout in which MatMulNBits multiplies by `weight`, or the reason (str) why it cannot."""
    layout = find_stored_layout(weight) if multiplies_codes(target) else NOT_ASKED
    if isinstance(layout, str):
        return layout
    assert isinstance(weight, Param)
    if weight.type.rank != 2:
        return "MatMulNBits takes matrices"
    if layout.floats:
        return f"no operator multiplies by {layout}: its codes are floats, which target torch takes"
    if layout.group not in GROUPS:
        return f"MatMulNBits does not take codes in groups of {layout.group}"
    if not is_quantized(weight) and (weight.type.dtype != dtypes.f32 or target.device != "cpu"):
        return f"{weight.type.dtype} weights are converted"
    return layout


def find_product_refusal(node: Node, target: Backend) -> str | None:
    layout = find_layout(node.operand("weight"), target)
    return layout if isinstance(layout, str) else None


def _find_norm_refusal(node: Node, target: Backend) -> str | None:
    return find_norm_refusal(node, target) or find_product_refusal(node, target)


def _find_lookup_refusal(node: Node, target: Backend) -> str | None:
    table = node.operand("table")
    layout = find_layout(table, target)
    if isinstance(layout, str):
        return layout
    assert isinstance(table, Param)
    if not is_quantized(table):
        return NOT_ASKED
    if layout.sums:
        return f"GatherBlockQuantized cannot decode {layout}"
    if layout.bits not in NATIVE:
        return f"GatherBlockQuantized does not take codes of {layout.bits} bits"
    if table.width % layout.group:
        return f"GatherBlockQuantized takes whole groups, and rows of {table.width} are not multiples of {layout.group}"
    return None


@lowering(ops.linear, targets=multiplies_codes, when=find_product_refusal, first=True)
def MatMulNBits(e: OnnxEmitter, node: Node) -> onnx.Value:
    return add_bias(e, multiply_codes(e, node.required_operand("x"), e[node.required_operand("x")], node), node)


@lowering(ops.norm_linear, targets=multiplies_codes, when=_find_norm_refusal, first=True)
def NormMatMulNBits(e: OnnxEmitter, node: Node) -> onnx.Value:
    return add_bias(e, multiply_codes(e, make_norm_key(node), apply_norm(e, node), node), node)


@lowering(ops.embedding, targets=multiplies_codes, when=_find_lookup_refusal, first=True)
def GatherBlockQuantized(e: OnnxEmitter, node: Node) -> onnx.Value:
    table, layout = get_quantized(node, "table")
    codes, scales, points = emit_native_parts(e, table, layout)
    # A tied output head shares the initializer of the codes: only the shape differs.
    flat = e.op("Reshape", codes, e.constant([int(table.shape[0]), -1]))
    return e.op(
        "GatherBlockQuantized",
        *(flat, e[node.required_operand("ids")], scales, points),
        domain=MS,
        bits=layout.bits,
        block_size=layout.group,
        gather_axis=0,
        quantize_axis=1,
    )


def multiply_codes(e: OnnxEmitter, key: object, x: onnx.Value, node: Node) -> onnx.Value:
    """Emit x Wᵀ for the quantized weight W of `node`. `key` identifies x: products with equal keys share nodes."""
    weight, layout = get_quantized(node)
    if layout.sums:
        x = append_sums(e, key, x, node.required_operand("x").type.rank, weight.width, layout.group)
        return _emit_matmul(e, x, emit_native_parts(e, weight, layout), weight, layout, layout.bits)
    slow = is_exact(weight) and layout.bits == 8 and e.target.device == "cpu" and weight.width % layout.group == 0
    if layout.bits in NATIVE and not slow:
        y = _emit_matmul(e, x, emit_native_parts(e, weight, layout), weight, layout, layout.bits)
    else:
        y = _multiply_nibbles(e, key, x, weight, layout)
    if layout.has_minimum or (layout.has_zeros and slow):
        sums = e.memo(("block sums", key, layout.group), lambda: _emit_block_sums(e, x, layout.group, weight.width))
        y = e.op("Add", y, e.op("FusedMatMul", sums, _emit_part(e, weight, "offsets"), domain=MS, transB=1))
    return y


def emit_native_parts(e: OnnxEmitter, weight: Param, layout: BlockLayout) -> Parts:
    """Return (codes [out, groups, bytes of a group], scales, zero points or None) of `weight` as MatMulNBits takes
    them; codes have the bits of the block layout."""
    last = layout.group * layout.bits // 8
    groups = compute_part_widths(layout, weight.width)["packed"] // last
    points = _emit_part(e, weight, "points") if layout.has_zeros else None
    scales = decode_scales(e, weight) if layout.sums else _emit_part(e, weight, "steps")
    return _emit_part(e, weight, "packed", groups, last), scales, points


def _multiply_nibbles(e: OnnxEmitter, key: object, x: onnx.Value, weight: Param, layout: BlockLayout) -> onnx.Value:
    """Emit x Wᵀ with 4-bit codes. 3-bit codes are widened. A row of 8-bit codes becomes its high halves, then its low
    halves, and is multiplied by [x, x]. `key` identifies x: calls with equal keys share [x, x]."""
    planes, groups = 2 if layout.bits == 8 else 1, -(-weight.width // layout.group)
    if planes == 2:  # only for rows of full groups
        x = e.memo(("twice", key), lambda: e.op("Concat", x, x, axis=-1))
    codes = _emit_part(e, weight, "codes", planes * groups, layout.group // 2)
    points = _emit_part(e, weight, "zeros") if planes == 2 or layout.has_zeros else None
    return _emit_matmul(e, x, (codes, _emit_part(e, weight, "scales"), points), weight, layout, 4, planes)


def _emit_matmul(
    e: OnnxEmitter, x: onnx.Value, parts: Parts, weight: Param, layout: BlockLayout, bits: int, planes: int = 1
) -> onnx.Value:
    group = layout.group
    sums = -(-weight.width // group) + _count_sums_padding(e, weight.width, group) if layout.sums else 0
    # Without zero points the kernel subtracts 2^{bits−1}.
    return e.op(
        "MatMulNBits",
        *(x, *parts),
        domain=MS,
        K=planes * weight.width + sums,
        N=int(weight.shape[0]),
        bits=bits,
        block_size=group,
        accuracy_level=None if is_exact(weight) else 4,
    )


def _emit_part(e: OnnxEmitter, weight: Param, name: str, *shape: int) -> onnx.Value:
    recipe = Stored(weight.recipe, name)
    reshaped = Reshape(recipe, (*map(int, weight.shape[:-1]), *shape)) if shape else recipe
    label = f"{weight.name}.{name}"
    if name == "steps":
        return cast_scales(e, label, reshaped, weight)
    return e.weight(label, reshaped, weight.type.dtype if name in ("scales", "offsets") else dtypes.u8)


def cast_scales(e: OnnxEmitter, label: str, recipe: Recipe, weight: Param) -> onnx.Value:
    """Return the scales of `weight`, which `recipe` computes, in the dtype of `weight`, as kernels need them. They are
    stored under the name `label`, as f16 with a cast if the block layout has f16 scales. ONNX Runtime folds the cast
    when it opens the model. Stored in f32, scales of groups of 32 would take half a bit more per weight."""
    layout, dtype = find_stored_layout(weight), weight.type.dtype
    assert isinstance(layout, BlockLayout)
    stored_dtype = dtypes.f16 if layout.scale == dtypes.f16 else dtype
    initializer = e.weight(label, recipe, stored_dtype)
    if stored_dtype == dtype:
        return initializer
    return e.memo(("scales", initializer), lambda: e.cast(initializer, dtype))


def decode_scales(e: OnnxEmitter, weight: Param, transposed: bool = False) -> onnx.Value:
    """Return the scales of `weight` (transposed if `transposed`), computed from their 8-bit codes and the largest scale
    of each row. ONNX Runtime folds this when it opens the model."""

    def part(name: str, dtype: DType) -> onnx.Value:
        recipe: Recipe = Stored(weight.recipe, name)
        recipe = Permute(recipe, (1, 0)) if transposed else recipe
        return e.cast(e.weight(f"{weight.name}.{name}{'.T' * transposed}", recipe, dtype), dtypes.f32)

    small, large = part("levels", dtypes.u8), part("largest", LARGEST)
    scales = e.op("Mul", small, e.op("Div", large, e.constant(255, dtypes.f32.numpy)))
    dtype = weight.type.dtype
    return scales if dtype == dtypes.f32 else e.cast(scales, dtype)


def _count_sums_padding(e: OnnxEmitter, width: int, group: int) -> int:
    """Return the zeros to append to group sums: on CUDA up to a full group, which some kernels need."""
    sums = -(-width // group)
    return 0 if e.target.device == "cpu" else -sums % group


def append_sums(e: OnnxEmitter, key: object, x: onnx.Value, rank: int, width: int, group: int) -> onnx.Value:
    """Return `x` [..., width], a tensor of `rank` axes, with its sums over each group appended along the last axis; on
    CUDA zeros follow up to a full group. `key` identifies x: calls with equal keys share nodes."""

    def concat_sums() -> onnx.Value:
        groups = e.op("Reshape", x, e.constant([*[0] * (rank - 1), -1, group]))
        extended = e.op("Concat", x, e.op("ReduceSum", groups, e.constant([-1]), keepdims=0), axis=-1)
        if not (padding := _count_sums_padding(e, width, group)):
            return extended
        return e.op("Pad", extended, e.constant([*[0] * (2 * rank - 1), padding]))

    return e.memo(("with sums", key, group), concat_sums)


def _emit_block_sums(e: OnnxEmitter, x: onnx.Value, group: int, width: int) -> onnx.Value:
    """Return the sums of `x` [..., width] over each group of features, [..., width / group]."""
    lead = e.op("Shape", x, start=0, end=-1)
    blocks = e.op("Reshape", x, e.op("Concat", lead, e.constant([width // group, group]), axis=0))
    return e.op("ReduceSum", blocks, e.constant([-1]), keepdims=0)

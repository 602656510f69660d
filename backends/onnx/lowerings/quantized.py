"""Products and lookups with weights that stay in quantized blocks, by ONNX Runtime's own operators.

MatMulNBits multiplies by codes of 2, 4 or 8 bits with zero points of the same width. Its accuracy level determines the
rounding of activations:

- Weights that a pass quantized use level 4 on a CPU: activations are rounded to 8-bit integers, group by group. Level 0
  is ten to a hundred times slower for 2 and 8 bits, and so is any level with floating-point zero points.
- Blocks of a checkpoint (--keep-blocks) use level 0: sums in f32, so results equal those of dequantized weights. An
  8-bit code is then computed as two 4-bit codes.

The minimum of a q4_1 block is not representable as a 4-bit zero point. The remainder is multiplied by the sum of the
activations over the block. If the minima are quantized themselves (`BlockLayout.sums`), the sums are appended to the
activations; if they are floats, this is a second, thin product.
"""

from __future__ import annotations

import onnx_ir as onnx

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.ir.recipes import Permute, Recipe, Reshape
from weft.ir.recipes.blocks import Stored, part_shapes
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import LARGEST, BlockLayout
from weft.ir.types.dtypes import DType

from ...blocks import NOT_ASKED, is_exact, is_quantized, kept_layout
from ...targets import Backend
from ..emitter import ONNX_DTYPES, Emitter
from ..lowering import contrib, lowering
from .layers import MS, biased, norm_key, norm_refusal, normed

GROUPS = (16, 32, 64, 128, 256)  # group sizes that MatMulNBits supports
NATIVE = (2, 4, 8)  # widths of its codes, in bits


def layout_of(weight: Value | None, target: Backend) -> BlockLayout | str:
    """Return the block layout of `weight` for MatMulNBits; or the reason why MatMulNBits cannot multiply by it."""
    layout = kept_layout(weight) if target.contrib else NOT_ASKED
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


def product_refusal(node: Node, target: Backend) -> str | None:
    layout = layout_of(node.operand("weight"), target)
    return layout if isinstance(layout, str) else None


def _norm_refusal(node: Node, target: Backend) -> str | None:
    return norm_refusal(node, target) or product_refusal(node, target)


def _lookup_refusal(node: Node, target: Backend) -> str | None:
    table = node.operand("table")
    layout = layout_of(table, target)
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


@lowering(ops.linear, targets=contrib, when=product_refusal, first=True)
def MatMulNBits(e: Emitter, node: Node) -> onnx.Value:
    return biased(e, product(e, node.required("x"), e[node.required("x")], node), node)


@lowering(ops.norm_linear, targets=contrib, when=_norm_refusal, first=True)
def NormMatMulNBits(e: Emitter, node: Node) -> onnx.Value:
    return biased(e, product(e, norm_key(node), normed(e, node), node), node)


@lowering(ops.embedding, targets=contrib, when=_lookup_refusal, first=True)
def GatherBlockQuantized(e: Emitter, node: Node) -> onnx.Value:
    ids, table = node.inputs
    assert isinstance(table, Param)
    layout, rows = layout_of(table, e.target), int(table.shape[0])
    assert isinstance(layout, BlockLayout)
    codes, scales, points = native(e, table, layout)
    # A tied output head shares the initializer of the codes: only the shape differs.
    flat = e.op("Reshape", codes, e.constant([rows, -1]))
    return e.op(
        "GatherBlockQuantized",
        *(flat, e[ids], scales, points),
        domain=MS,
        bits=layout.bits,
        block_size=layout.group,
        gather_axis=0,
        quantize_axis=1,
    )


def product(e: Emitter, key: object, x: onnx.Value, node: Node) -> onnx.Value:
    """Emit x Wᵀ for the quantized weight of `node`; `key` identifies x for shared subgraphs."""
    weight = node.required("weight")
    assert isinstance(weight, Param)
    layout = layout_of(weight, e.target)
    assert isinstance(layout, BlockLayout)
    exact = is_exact(weight)
    level, whole = 0 if exact else 4, weight.width % layout.group == 0
    if layout.sums:
        x = with_sums(e, key, x, node.required("x").type.rank, weight.width, layout.group)
        codes, scales, points = native(e, weight, layout)
        return _matmul(e, x, codes, scales, points, weight, layout.bits, layout.group, level)
    slow = exact and layout.bits == 8 and e.target.device == "cpu" and whole
    if layout.bits in NATIVE and not slow:
        codes, scales, points = native(e, weight, layout)
        y = _matmul(e, x, codes, scales, points, weight, layout.bits, layout.group, level)
    else:
        y = _by_nibbles(e, key, x, weight, layout, level)
    if layout.has_minimum or (layout.has_zeros and slow):
        sums = e.memo(("block sums", key, layout.group), lambda: _block_sums(e, x, layout.group, weight.width))
        y = e.op("Add", y, e.op("FusedMatMul", sums, _part(e, weight, "offsets"), domain=MS, transB=1))
    return y


def native(e: Emitter, weight: Param, layout: BlockLayout) -> tuple[onnx.Value, onnx.Value, onnx.Value | None]:
    """Return codes [out, groups, bytes of a group], scales and zero points of `weight` in the bits of its layout."""
    last = layout.group * layout.bits // 8
    groups = part_shapes(layout, weight.width)["packed"] // last
    points = _part(e, weight, "points") if layout.has_zeros else None
    scales = levels(e, weight) if layout.sums else _part(e, weight, "steps")
    return _part(e, weight, "packed", groups, last), scales, points


def _by_nibbles(e: Emitter, key: object, x: onnx.Value, weight: Param, layout: BlockLayout, level: int) -> onnx.Value:
    """Emit the product with 4-bit codes only: 3-bit codes are widened, 8-bit codes are split, the high half first."""
    planes, groups = 2 if layout.bits == 8 else 1, -(-weight.width // layout.group)
    if planes == 2:  # only for rows of full groups
        x = e.memo(("twice", key), lambda: e.op("Concat", x, x, axis=-1))
    codes = _part(e, weight, "codes", planes * groups, layout.group // 2)
    points = _part(e, weight, "zeros") if planes == 2 or layout.has_zeros else None
    return _matmul(e, x, codes, _part(e, weight, "scales"), points, weight, 4, layout.group, level, planes)


def _matmul(
    e: Emitter,
    x: onnx.Value,
    codes: onnx.Value,
    scales: onnx.Value,
    points: onnx.Value | None,
    weight: Param,
    bits: int,
    group: int,
    level: int,
    planes: int = 1,
) -> onnx.Value:
    layout = kept_layout(weight)
    assert isinstance(layout, BlockLayout)
    sums = -(-weight.width // group) + _padding(e, weight.width, group) if layout.sums else 0
    # Without zero points the kernel subtracts 2^{bits−1}.
    return e.op(
        "MatMulNBits",
        *(x, codes, scales, points),
        domain=MS,
        K=planes * weight.width + sums,
        N=int(weight.shape[0]),
        bits=bits,
        block_size=group,
        accuracy_level=level or None,
    )


def _part(e: Emitter, weight: Param, name: str, *shape: int) -> onnx.Value:
    recipe = Stored(weight.recipe, name)
    whole = Reshape(recipe, (*map(int, weight.shape[:-1]), *shape)) if shape else recipe
    label = f"{weight.name}.{name}"
    if name not in ("steps", "scales", "offsets"):
        return e.weight(label, whole, dtypes.u8)
    if name == "steps":
        return scales(e, label, whole, weight)
    return e.weight(label, whole, weight.type.dtype)


def scales(e: Emitter, label: str, recipe: Recipe, weight: Param) -> onnx.Value:
    """Return the scales of `weight` in its dtype, as kernels need them, cast from f16 if the layout stores f16.

    ONNX Runtime folds the cast when it opens the model. Stored in f32, scales would take half a bit more per weight.
    """
    layout, dtype = kept_layout(weight), weight.type.dtype
    assert isinstance(layout, BlockLayout)
    stored = dtypes.f16 if layout.scale == dtypes.f16 else dtype
    found = e.weight(label, recipe, stored)
    if stored == dtype:
        return found
    return e.memo(("scales", found), lambda: e.op("Cast", found, to=int(ONNX_DTYPES[dtype.name])))


def levels(e: Emitter, weight: Param, turned: bool = False) -> onnx.Value:
    """Compute the scales of `weight` from their 8-bit codes, fractions of the largest scale of a row; transpose them if
    `turned`. ONNX Runtime folds this when it opens the model."""

    def part(name: str, dtype: DType) -> onnx.Value:
        recipe: Recipe = Stored(weight.recipe, name)
        found = e.weight(f"{weight.name}.{name}{'.T' * turned}", Permute(recipe, (1, 0)) if turned else recipe, dtype)
        return e.op("Cast", found, to=int(ONNX_DTYPES["f32"]))

    small, large = part("levels", dtypes.u8), part("largest", LARGEST)
    scales = e.op("Mul", small, e.op("Div", large, e.constant(255, dtypes.f32.numpy)))
    dtype = weight.type.dtype
    return scales if dtype == dtypes.f32 else e.op("Cast", scales, to=int(ONNX_DTYPES[dtype.name]))


def _padding(e: Emitter, width: int, group: int) -> int:
    """Return the zeros to append after the sums of `width` activations: CUDA kernels for few rows need full groups."""
    sums = -(-width // group)
    return 0 if e.target.device == "cpu" else -sums % group


def with_sums(e: Emitter, key: object, x: onnx.Value, rank: int, width: int, group: int) -> onnx.Value:
    """Append to `x` [..., width] its sums over each group: [..., width + width / group], padded; `key` identifies x."""

    def made() -> onnx.Value:
        groups = e.op("Reshape", x, e.constant([*[0] * (rank - 1), -1, group]))
        whole = e.op("Concat", x, e.op("ReduceSum", groups, e.constant([-1]), keepdims=0), axis=-1)
        if not (more := _padding(e, width, group)):
            return whole
        return e.op("Pad", whole, e.constant([*[0] * (2 * rank - 1), more]))

    return e.memo(("with sums", key, group), made)


def _block_sums(e: Emitter, x: onnx.Value, group: int, width: int) -> onnx.Value:
    """Return the sums of `x` [..., in] over each group, [..., in / group]."""
    lead = e.op("Shape", x, start=0, end=-1)
    blocks = e.op("Reshape", x, e.op("Concat", lead, e.constant([width // group, group]), axis=0))
    return e.op("ReduceSum", blocks, e.constant([-1]), keepdims=0)

"""Linear maps by the quantized blocks that the checkpoint stores, where they are to be kept.

MatMulNBits multiplies f32 activations by 4-bit blocks and adds up in f32: the numbers are those of the dequantized
weights, read in an eighth of the bytes. It takes one zero point of 4 bits a block, so what the minimum of a q4_1 block
has beyond that enters as a second, thin product with the sums of the activations over each block.
"""

from __future__ import annotations

from collections import Counter

import onnx_ir as onnx

from weft.ir import ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.recipes import Reshape
from weft.ir.recipes.quantized import Stored, stored_layout
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BlockLayout
from weft.ir.types.dtypes import DType

from ...options import KEEP_BLOCKS
from ...targets import Backend
from ..emitter import Emitter
from ..lowering import contrib_on, lowering
from .layers import MS, biased

GROUPS = (16, 32, 64, 128, 256)  # that MatMulNBits takes


def _layout(weight: Value | None) -> BlockLayout | str:
    if not isinstance(weight, Param):
        return "its weight is no parameter"
    layout = stored_layout(weight.recipe, weight.graph.reader)
    if isinstance(layout, BlockLayout) and layout.floats:
        return f"no operator multiplies by {layout}: its codes are floats"
    return layout


def _refusal(node: Node, target: Backend) -> str | None:
    weight = node.required("weight")
    head = weight.shape[0] == weight.graph.meta.get("vocab")
    asked = weight.graph.meta.get(KEEP_BLOCKS)
    if not asked or (asked == "head" and not head):
        return ""
    if weight.type.dtype != dtypes.f32:
        return f"{weight.type.dtype} weights are converted"
    layout = _layout(weight)
    if isinstance(layout, str):
        return layout
    if layout.group not in GROUPS:
        return f"MatMulNBits does not take codes in groups of {layout.group}"
    return None


@lowering(ops.linear, targets=contrib_on("cpu"), when=_refusal, first=True)
def MatMulNBits(e: Emitter, node: Node) -> onnx.Value:
    x, weight = node.required("x"), node.required("weight")
    assert isinstance(weight, Param)
    layout, (rows, width) = _layout(weight), weight.shape
    assert isinstance(layout, BlockLayout) and isinstance(rows, int) and isinstance(width, int)
    data, planes = e[x], 1
    # 8-bit codes as two planes of 4 bits, high half first: the kernel for 8 bits is about 50 times slower in f32.
    if layout.bits == 8:
        data, planes = e.memo(("twice", x), lambda: e.op("Concat", e[x], e[x], axis=-1)), 2

    def part(name: str, dtype: DType, *shape: int) -> onnx.Value:
        recipe = Stored(weight.recipe, name)
        return e.weight(f"{weight.name}.{name}", Reshape(recipe, (rows, *shape)) if shape else recipe, dtype)

    # accuracy_level stays 0 (sums in f32): faster levels round the activations. Without zeros the kernel subtracts 8.
    y: onnx.Value = e.op(
        "MatMulNBits",
        data,
        part("codes", dtypes.u8, planes * width // layout.group, layout.group // 2),
        part("scales", dtypes.f32),
        part("zeros", dtypes.u8) if planes == 2 else None,
        domain=MS,
        K=planes * width,
        N=rows,
        bits=4,
        block_size=layout.group,
    )
    if layout.has_minimum:
        sums = e.memo(("block sums", x, layout.group), lambda: _block_sums(e, x, layout.group))
        y = e.op("Add", y, e.op("FusedMatMul", sums, part("offsets", dtypes.f32), domain=MS, transB=1))
    return biased(e, y, node)


def keeps(model: onnx.Model) -> bool:
    """Return whether a product of `model` reads the blocks of the source."""
    return any(node.op_type == MatMulNBits.__name__ for node in model.graph.all_nodes())


def summary(graph: Graph, target: Backend) -> dict[str, int]:
    """Count the weights of `graph` that stay in blocks, by block layout."""
    linears = (node for node in graph.nodes if node.op is ops.linear and _refusal(node, target) is None)
    weights = dict.fromkeys(weight for node in linears if isinstance(weight := node.operand("weight"), Param))
    return dict(Counter(str(stored_layout(weight.recipe, graph.reader)) for weight in weights))


def no_blocks(graph: Graph, target: Backend) -> str:
    """Return why --keep-blocks keeps none."""
    reasons = (_refusal(node, target) for node in graph.nodes if node.op is ops.linear)
    return next((reason for reason in reasons if reason), "there is no such linear map")


def _block_sums(e: Emitter, x: Value, group: int) -> onnx.Value:
    """The sums of `x` [..., in] over each group, [..., in / group]."""
    split = [0] * (x.type.rank - 1) + [-1, group]
    blocks = e.op("Reshape", e[x], e.constant(split))
    return e.op("ReduceSum", blocks, e.constant([-1]), keepdims=0)

"""Linear maps and embeddings that keep their weights in quantized blocks."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.ir.recipes.blocks import Kept
from weft.ir.recipes.blocks.parts import choose_kernel_bits
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BlockLayout

from ..program.block_params import find_layout, find_plain_vector, is_embedding_table, make_block_params
from ..program.emitter import Emitter
from ..program.registry import lowering
from ..program.statements import TORCH_NAMES, ParamRef, Submodule, Var


def _refuse_blocks(node: Node) -> str | None:
    layout = find_layout(node.operand("weight" if node.op is ops.linear else "table"))
    return layout if isinstance(layout, str) else None


@lowering(ops.linear, when=_refuse_blocks, first=True)
def _block_linear(e: Emitter, node: Node) -> Var:
    x, weight, bias = node.required_operand("x"), node.required_operand("weight"), node.operand("bias")
    assert isinstance(weight, Param)
    leaf, with_bias = make_block_module(e, weight, bias)
    text = "{1}.linear({0})" if is_embedding_table(weight) else "{1}({0})"
    return e.emit(text, x, leaf) if with_bias or bias is None else e.emit(f"{text} + {{2}}", x, leaf, bias)


@lowering(ops.embedding, when=_refuse_blocks, first=True)
def _block_embedding(e: Emitter, node: Node) -> Var:
    ids, table = node.required_operand("ids"), node.required_operand("table")
    assert isinstance(table, Param)
    leaf, _ = make_block_module(e, table, None)
    like = find_plain_vector(e.graph)
    assert like is not None
    e.program.weights[like.name] = like
    name = "x" if ids in e.graph.inputs.values() else ""
    return e.emit("{1}({0}).to({2})", ids, leaf, ParamRef(like.name, tuple(like.type.concrete({}))), name=name)


def make_block_module(e: Emitter, weight: Param, bias: Value | None) -> tuple[Submodule, bool]:
    """Return the module with `weight`, which stays in blocks, and whether that module also adds the `bias`."""
    layout = find_layout(weight)
    assert isinstance(layout, BlockLayout)
    if weight not in e.blocks:
        e.blocks[weight] = make_block_params(weight, layout)
    parts = e.blocks[weight]
    out, width = weight.type.concrete({})
    options = f"bits={choose_kernel_bits(layout)}, group={layout.group}{', offsets=True' * ('offsets' in parts)}"
    if layout.floats:
        rounded = isinstance(weight.recipe, Kept) and weight.recipe.activations == "fp8"
        options += ", floats=True" + ", activations=True" * (rounded and layout.bits == 8)
    if layout.small_floats:
        options += f", scales=torch.{'float8_e8m0fnu' if layout.scale == dtypes.u8 else 'float8_e4m3fn'}"
    elif layout.scale_dtype != dtypes.f16:
        options += f", scales=torch.{TORCH_NAMES[layout.scale_dtype.name]}"
    table = is_embedding_table(weight)
    init = f"QuantizedEmbedding({out}, {width}, {options}" if table else f"QuantizedLinear({width}, {out}, {options}"
    with_bias = None if table or bias is None else e.make_submodule(f"{init}, bias=True)", **parts, bias=bias)
    leaf = with_bias or e.make_submodule(f"{init})", **parts)
    assert leaf is not None
    return leaf, with_bias is not None

"""Linear maps, embeddings, norms and gated units, with weights that are dense or stay in quantized blocks."""

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
from .calls import FunctionCall
from .elementwise import format_number, write_activation


@lowering(ops.linear)
def _linear(e: Emitter, node: Node) -> Var:
    x, weight, bias = node.required_operand("x"), node.required_operand("weight"), node.operand("bias")
    out, width = e.shape_of(weight)
    init = f"nn.Linear({width}, {out}{'' if bias is not None else ', bias=False'})"
    leaf = e.make_submodule(init, weight=weight, bias=bias)
    if leaf is not None:
        return e.emit("{1}({0})", x, leaf)
    return FunctionCall("F.linear").add(x, weight, *([] if bias is None else [bias])).emit(e)


@lowering(ops.conv1d)
def _conv1d(e: Emitter, node: Node) -> Var:
    x, weight, bias = node.required_operand("x"), node.required_operand("weight"), node.operand("bias")
    (before, after), stride, groups = node.attrs["padding"], node.attrs["stride"], node.attrs["groups"]
    symmetric = before == after  # nn.Conv1d pads both ends alike
    options = {"stride": (stride, 1), "padding": (before if symmetric else 0, 0), "groups": (groups, 1)}
    extra = "".join(f", {name}={value}" for name, (value, default) in options.items() if value != default)
    signals = "{0}.mT" if symmetric else f"F.pad({{0}}.mT, ({before}, {after}))"
    out, width, kernel = weight.shape
    init = f"nn.Conv1d({width * groups}, {out}, {kernel}{extra}{', bias=False' * (bias is None)})"
    leaf = e.make_submodule(init, weight=weight, bias=bias)
    if leaf is not None:
        return e.emit(f"{{1}}({signals}).mT", x, leaf)
    if bias is None:
        return e.emit(f"F.conv1d({signals}, {{1}}{extra}).mT", x, weight)
    return e.emit(f"F.conv1d({signals}, {{1}}, {{2}}{extra}).mT", x, weight, bias)


@lowering(ops.matmul)
def _matmul(e: Emitter, node: Node) -> Var:
    return e.emit("{0} @ {1}", node.required_operand("x"), node.required_operand("y"))


@lowering(ops.embedding)
def _embedding(e: Emitter, node: Node) -> Var:
    ids, table = node.required_operand("ids"), node.required_operand("table")
    rows, width = e.shape_of(table)
    leaf = e.make_submodule(f"nn.Embedding({rows}, {width})", weight=table)
    name = "x" if ids in e.graph.inputs.values() else ""
    if leaf is not None:
        return e.emit("{1}({0})", ids, leaf, name=name)
    return e.emit("F.embedding({0}, {1})", ids, table, name=name)


@lowering(ops.rms_norm)
def _rms_norm(e: Emitter, node: Node) -> Var:
    x, weight, eps = node.required_operand("x"), node.operand("weight"), e.attr(node, "eps")
    width = e.size_of(x)
    leaf = None if weight is None else e.make_submodule(f"nn.RMSNorm({width}, eps={eps!r})", weight=weight)
    if leaf is not None:
        return e.emit("{1}({0})", x, leaf, replaces=0)
    return FunctionCall("F.rms_norm").add(x, f"({width},)", weight, repr(eps)).emit(e, replaces=x)


@lowering(ops.layer_norm)
def _layer_norm(e: Emitter, node: Node) -> Var:
    x, weight, bias, eps = node.required_operand("x"), node.operand("weight"), node.operand("bias"), e.attr(node, "eps")
    init = f"nn.LayerNorm({e.size_of(x)}, eps={eps!r}{'' if bias is not None else ', bias=False'})"
    leaf = None if weight is None else e.make_submodule(init, weight=weight, bias=bias)
    if leaf is not None:
        return e.emit("{1}({0})", x, leaf, replaces=0)
    return FunctionCall("F.layer_norm").add(x, f"({e.size_of(x)},)", weight, bias, repr(eps)).emit(e, replaces=x)


@lowering(ops.glu)
def _glu(e: Emitter, node: Node) -> Var:
    gate, up = node.required_operand("gate"), node.required_operand("up")
    limit, shift = e.attr(node, "limit"), node.attrs["shift"]
    a, b = e[gate], e[up]
    if limit is not None:
        a = e.emit(f"{{0}}.clamp(max={format_number(limit)})", a, name="gate", replaces=0)
        b = e.emit(f"{{0}}.clamp(-{format_number(limit)}, {format_number(limit)})", b, name="up", replaces=0)
    factor = "{1}" if shift == 0 else f"({{1}} + {format_number(shift)})"
    return e.emit(f"({write_activation(node.attrs['activation'])}) * {factor}", a, b)


@lowering(ops.head_linear)
def _head_linear(e: Emitter, node: Node) -> Var:
    part = "head_linear_inverse" if node.attrs["inverse"] else "head_linear"
    call = FunctionCall(part).add(node.required_operand("x"), node.required_operand("weight"))
    return call.add(str(e.attr(node, "heads"))).emit(e)


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

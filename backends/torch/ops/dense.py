"""Linear maps, embeddings, norms and gated units."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Node

from ..program.emitter import Emitter
from ..program.registry import lowering
from ..program.statements import Var
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

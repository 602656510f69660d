"""Ops that move elements: shapes, slices, concatenation, gathers."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Node, Value
from weft.passes.analysis.states import EMBEDDED

from ..program.emitter import Emitter, choose_name
from ..program.registry import lowering
from ..program.stateful_nodes import emit_key_positions
from ..program.statements import Operand, Var
from .calls import FunctionCall
from .elementwise import format_number


@lowering(ops.reshape)
def _reshape(e: Emitter, node: Node) -> Var:
    x, to = node.required_operand("x"), node.output.shape
    shape, previous = x.shape, x.producer.inputs[0] if x.producer is not None and x.producer.op is ops.reshape else None
    comment = f"[{', '.join(map(str, to))}]"
    if shape == to:
        return e.emit("{0}", x, replaces=0)
    if previous is not None and previous.shape == to:  # undoes the reshape before
        return e.emit("{0}", previous)
    if len(to) == 4 and to[:2] == shape[:-1] and (heads := e.find_heads(x, to[2])) is not None:
        return e.emit("{0}.transpose(1, 2)", heads, name=heads.name, comment=comment)
    if len(to) == len(shape) + 1 and to[: len(shape) - 1] == shape[:-1] and isinstance(shape[-1], int):
        return e.emit(f"{{0}}.unflatten(-1, (-1, {e.size_of(node.output)}))", x, replaces=0, comment=comment)
    if len(to) == len(shape) - 1 and to[:-1] == shape[:-2] and isinstance(to[-1], int):
        return e.emit(f"{{0}}.flatten({len(to) - 1})", x, replaces=0, comment=comment)
    text, sizes = e.write_shape(e.shape_of(node.output), x, first=1)
    return e.emit(f"{{0}}.reshape({text})", x, *sizes, comment=comment)


@lowering(ops.transpose)
def _transpose(e: Emitter, node: Node) -> Var:
    x, axes = node.required_operand("x"), node.attrs["axes"]
    moved = [i for i, a in enumerate(axes) if i != a]
    comment = f"[{', '.join(map(str, node.output.shape))}]"
    if len(moved) == 2:
        return e.emit(f"{{0}}.transpose({moved[0]}, {moved[1]})", x, replaces=0, comment=comment)
    return e.emit(f"{{0}}.permute({', '.join(map(str, axes))})", x, replaces=0, comment=comment)


@lowering(ops.unsqueeze)
def _unsqueeze(e: Emitter, node: Node) -> Var:
    if tuple(node.attrs["axes"]) == (2,) and (heads := e.find_heads(node.required_operand("x"), 1)) is not None:
        return e.emit("{0}.transpose(1, 2)", heads, name=heads.name)
    axes = node.attrs["axes"]
    places = ["None" if i in axes else ":" for i in range(max(axes, default=-1) + 1)]
    return e.emit(f"{{0}}[{', '.join(places)}]" if places else "{0}", node.required_operand("x"), replaces=0)


@lowering(ops.squeeze)
def _squeeze(e: Emitter, node: Node) -> Var:
    x, axes = node.required_operand("x"), node.attrs["axes"]
    slice_node = x.producer
    if slice_node is not None and slice_node.op is ops.slice_ and len(axes) == 1 and len(x.uses) == 1:
        axis, start = slice_node.attrs["axis"] % len(x.shape), slice_node.attrs["start"]
        if axis == axes[0] % len(x.shape) and isinstance(start, int):  # a slice of size 1: an index
            return e.emit(f"{{0}}[{', '.join([':'] * axis + [str(start)])}]", slice_node.required_operand("x"))
    return e.emit(f"{{0}}.squeeze({axes[0] if len(axes) == 1 else tuple(axes)})", x, replaces=0)


@lowering(ops.expand)
def _expand(e: Emitter, node: Node) -> Var:
    x = node.required_operand("x")
    if _needs_no_expand(e, node.output):
        return e.emit("{0}", x, replaces=0)
    shape = (None,) * (len(node.output.shape) - len(x.shape)) + x.shape
    texts, sizes = [], list[Operand]()
    tokens = [v for name, v in e.graph.inputs.items() if name.endswith(("input_ids", EMBEDDED)) and "." not in e.scope]
    for have, want in zip(shape, node.output.shape, strict=True):
        if have == want and have is not None:
            texts.append("-1")
        else:
            text, used = e.write_shape((want,), *tokens, first=1 + len(sizes))
            texts.append(text)
            sizes += used
    return e.emit(f"{{0}}.expand({', '.join(texts)})", x, *sizes, replaces=0)


def _needs_no_expand(e: Emitter, value: Value) -> bool:
    """Return whether broadcasting can replace the expand that computes `value`: its only reader, perhaps after
    embeddings, casts and affine maps, adds it to a value of its shape that is not expanded."""
    if len(value.uses) != 1 or value in e.graph.outputs.values():
        return False
    reader, index = value.uses[0]
    if reader.op in (ops.embedding, ops.affine, ops.cast) and index == 0:
        return _needs_no_expand(e, reader.output)
    operands = [v for v in reader.inputs if v is not None and v is not value]
    return reader.op is ops.add and any(v.shape == value.shape and not _is_expanded(v) for v in operands)


def _is_expanded(value: Value | None) -> bool:
    """Return whether `value` is the result of an expand, or of an embedding, affine or cast of such a result."""
    producer = None if value is None else value.producer
    if producer is None or producer.op not in (ops.expand, ops.embedding, ops.affine, ops.cast):
        return False
    return producer.op is ops.expand or _is_expanded(producer.inputs[0])


@lowering(ops.concat)
def _concat(e: Emitter, node: Node) -> Var:
    places = "".join(f"{{{i}}}, " for i in range(len(node.inputs)))
    return e.emit(f"torch.cat(({places}), {node.attrs['axis']})", *_list_operands(node))


@lowering(ops.split)
def _split(e: Emitter, node: Node) -> tuple[Var, ...]:
    names, axis = tuple(map(choose_name, node.outputs)), node.attrs["axis"]
    text = f"{{0}}.split(({', '.join(str(e.size_of(v, axis)) for v in node.outputs)}), {axis})"
    return e.emit_tuple(text, node.required_operand("x"), names=names, shapes=tuple(v.shape for v in node.outputs))


@lowering(ops.slice_)
def _slice(e: Emitter, node: Node) -> Var:
    x = node.required_operand("x")
    axis, start, stop, step = (node.attrs[k] for k in ("axis", "start", "stop", "step"))
    axis %= len(x.shape)
    begin, first = ("", []) if start == 0 else e.write_shape((start,), x, first=1)
    end, last = ("", []) if stop == x.shape[axis] else e.write_shape((stop,), x, first=1 + len(first))
    cut = f"{begin}:{end}" + (f":{step}" if step != 1 else "")
    return e.emit(f"{{0}}[{', '.join([':'] * axis + [cut])}]", x, *first, *last)


@lowering(ops.pad)
def _pad(e: Emitter, node: Node) -> Var:
    x, axis = node.required_operand("x"), node.attrs["axis"] % len(node.required_operand("x").shape)
    before, after = node.attrs["before"], node.attrs["after"]
    zeros = "0, 0, " * (len(x.shape) - 1 - axis)
    return e.emit(f"F.pad({{0}}, ({zeros}{before}, {after}), value={format_number(node.attrs['value'])})", x)


@lowering(ops.iota)
def _iota(e: Emitter, node: Node) -> Var:
    x = node.required_operand("x")
    if node in e.bias_nodes:
        return e.emit("{0}[0]", emit_key_positions(e))
    return e.emit(f"torch.arange({{0}}.shape[{node.attrs['axis']}], device={{0}}.device)", x)


@lowering(ops.one_hot)
def _one_hot(e: Emitter, node: Node) -> Var:
    return e.emit(f"F.one_hot({{0}}, {node.attrs['depth']}).float()", node.required_operand("ids"))


@lowering(ops.gather)
def _gather(e: Emitter, node: Node) -> Var:
    axis = node.attrs["axis"] % len(node.required_operand("x").shape)
    return e.emit(f"{{0}}[{', '.join([':'] * axis + ['{1}'])}]", *_list_operands(node))


@lowering(ops.gather_rows)
def _gather_rows(e: Emitter, node: Node) -> Var:
    return e.emit("gather_rows({0}, {1})", *_list_operands(node))


@lowering(ops.scatter_rows)
def _scatter_rows(e: Emitter, node: Node) -> Var:
    return e.emit(f"scatter_rows({{0}}, {{1}}, {{2}}, {node.attrs['axis']})", *_list_operands(node))


@lowering(ops.top_k)
def _top_k(e: Emitter, node: Node) -> tuple[Var, ...]:
    names = tuple(v.name.rpartition(".")[2] for v in node.outputs)
    return e.emit_tuple(f"top_k({{0}}, {node.attrs['k']})", node.required_operand("x"), names=names)


@lowering(ops.choose_tokens, kernels=True)
def _choose_tokens(e: Emitter, node: Node) -> Var:
    call = FunctionCall("choose_tokens").add(node.required_operand("logits"))
    if node.attrs["temperature"] > 0:
        uniforms = call.placeholder(node.required_operand("uniforms"))
        call.add(f"{uniforms}.double()", f"torch.zeros_like({uniforms}, dtype=torch.int64)")
        for name, attr in node.op.attrs.items():
            call.set(name, node.attrs[name], attr.default)
    return call.emit(e, "[:, None]", name="tokens")


def _list_operands(node: Node) -> list[Value]:
    return [v for v in node.inputs if v is not None]

"""The statements of a decode step: those of the kernels where a pattern fits, else those of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft.ir import ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.passes import Trace, legalize

from ..lowering import LOWERINGS, needed, refusals
from ..ops.elementwise import number
from ..positions import begin, end, query_positions
from ..program import Emitter, Held, Leaf, Operand, Program, Slot, Var, attribute_path
from ..states import cached_nodes, counts_keys
from . import patterns
from .patterns import NormOf, Projection


@dataclass
class Step:
    """The program of a decode step; `chosen` tells of every node with a kernel, or with a reason for none."""

    program: Program
    chosen: list[tuple[Node, str]] = field(default_factory=list)


class StepEmitter(Emitter):
    """An emitter whose modules are those of the model."""

    def leaf(self, init: str, **weights: Value | None) -> Leaf | None:
        found = super().leaf(init, **weights)
        return None if found is None else Leaf(f"{found.path}.module", "module")

    def give(self, name: str, default: str, type: str) -> Var:
        return super().give(name, "", type.removesuffix(" | None"))

    # -- what kernels read

    def weight(self, param: Param) -> Held:
        key = attribute_path(param.name)
        self.program.weights[key] = param
        return Held(key, tuple(param.type.concrete({})))

    def packed(self, params: Sequence[Param], name: str) -> Operand | None:
        """Weights one under the other, as `name` beside the first; None if they do not stand side by side."""
        if len(params) == 1:
            return self.weight(params[0])
        places = [attribute_path(p.name).split(".") for p in params]
        if len({(*p[:-2], p[-1]) for p in places}) != 1 or any(len(p) < 2 for p in places):
            return None
        outer, kind = places[0][:-2], places[0][-1]
        return Leaf(".".join([*outer, f"{name}_{kind}"]), f"pack:{kind}:{','.join(p[-2] for p in places)}")

    def norm(self, norm: NormOf) -> Leaf | None:
        """The norm before a product as kernels take it."""
        node = norm.node
        return None if node is None else self.norm_node(node)

    def norm_node(self, node: Node) -> Leaf:
        kind = "rms" if node.op is ops.rms_norm else "layer"
        given = [attribute_path(w.name) for w in node.inputs[1:] if isinstance(w, Param)]
        path = given[0].rpartition(".")[0] if given else f"{self.scope}.norm_{node.output.name.rpartition('.')[2]}"
        parts = ",".join(g.rpartition(".")[2] for g in given)
        return Leaf(f"{path}.norm", f"norm:{kind}:{node.attrs['eps']!r}:{parts}")


def lower_step(graph: Graph) -> Step:
    """The decode step of `graph`, a model that generates."""
    graph = graph.clone()
    legalize(graph, refusals, Trace())
    cached = cached_nodes(graph)
    emitter = StepEmitter(graph, cached, counts_keys(graph, cached))
    begin(emitter)
    for var in emitter.program.inputs:  # a step is given all there is
        var.default, var.type = "", var.type.removesuffix(" | None")
    step = Step(emitter.program)
    for node in list(graph.nodes):
        emitter.enter(node)
        made: Operand | Iterable[Operand] | None = _fused(emitter, node, step)
        if made is None:
            chosen = next(c for c in LOWERINGS[node.op.name] if c.when(node) is None)
            made = chosen.emit(emitter, node)
        if made is not None:
            results = list(made) if isinstance(made, Iterable) else [made]
            for value, operand in zip(node.outputs, results, strict=True):
                emitter[value] = operand
    emitter.leave()
    program = emitter.program
    program.outputs = {name: emitter[value] for name, value in graph.outputs.items()}
    program.statements = end(emitter, needed(program))
    return step


def _fused(e: StepEmitter, node: Node, step: Step) -> Var | None:
    """What the kernel that ends with `node` makes, if there is one."""
    made: Var | None = None
    if node.op is ops.attention and node in e.cached:
        found = patterns.self_attention(node)
        if isinstance(found, str):
            step.chosen.append((node, found))
            return None
        made = _attention(e, found, step)
    elif node.op is ops.add:
        made = _residual(e, node, step)
    elif node.op is ops.glu and (pair := patterns.gated(node)):
        made = _gated(e, node, *pair, step)
    elif activation := patterns.activated(node):
        made = _linear(e, activation[0], f", activation={activation[1]!r}")
        step.chosen.append((node, "norm_linear with the activation inside"))
    elif node.op is ops.linear and (plain := patterns.projection(node.output)):
        made = _linear(e, plain, "")
        step.chosen.append((node, "norm_linear"))
    return made


def _outer(*paths: str) -> str:
    """The innermost scope around all of `paths`."""
    parts = [p.split(".") for p in paths]
    common = []
    for column in zip(*parts, strict=False):
        if len({*column}) != 1:
            break
        common.append(column[0])
    return ".".join(common)


def _within(e: StepEmitter, operands: Sequence[Operand | None]) -> None:
    """Let what follows stand in the scope that has all weights among `operands`."""
    paths = [o.path.rpartition(".")[0] for o in operands if isinstance(o, (Held, Leaf))]
    if e.scope:
        e.scope = _outer(e.scope, *paths)
        if e.scope.rpartition(".")[2].isdigit() is False and any(
            p.startswith(f"{e.scope}.") and p[len(e.scope) + 1 :].split(".")[0].isdigit() for p in paths
        ):
            e.scope = e.scope.rpartition(".")[0]  # a list of modules computes nothing


def _options(e: StepEmitter, operands: list[Value | Operand], **named: Operand | None) -> str:
    """Text of keyword arguments, whose values join `operands`."""
    text = ""
    for name, operand in named.items():
        if operand is not None:
            text += f", {name}={{{len(operands)}}}"
            operands.append(operand)
    return text


def _linear(e: StepEmitter, p: Projection, more: str) -> Var:
    weight, norm = e.weight(p.weight), e.norm(p.source)
    bias = None if p.bias is None else e.weight(p.bias)
    _within(e, (weight, norm, bias))
    operands: list[Value | Operand] = [p.source.x, weight]
    text = _options(e, operands, bias=bias, norm=norm)
    return e.emit(f"norm_linear({{0}}, {{1}}{text}{more})", *operands)


def _gated(e: StepEmitter, node: Node, gate: Projection, up: Projection, step: Step) -> Var | None:
    weight = e.packed((gate.weight, up.weight), "gate_up")
    bias = None if gate.bias is None or up.bias is None else e.packed((gate.bias, up.bias), "gate_up")
    if weight is None or (gate.bias is not None and bias is None):
        step.chosen.append((node, "gate and up do not stand side by side"))
        return None
    norm = e.norm(gate.source)
    _within(e, (weight, norm, bias))
    operands: list[Value | Operand] = [gate.source.x, weight]
    text = _options(e, operands, bias=bias, norm=norm)
    activation = node.attrs["activation"]
    text += "" if activation == "silu" else f", activation={activation!r}"
    step.chosen.append((node, "norm_glu: norm, gate, up and activation"))
    return e.emit(f"norm_glu({{0}}, {{1}}{text})", *operands, name="h")


def _residual(e: StepEmitter, node: Node, step: Step) -> Var | None:
    found = patterns.residual(node)
    if found is None:
        return None
    weight = e.weight(found.projection.weight)
    bias = None if found.projection.bias is None else e.weight(found.projection.bias)
    norm = e.norm(found.norm)
    _within(e, (weight, norm, bias))
    operands: list[Value | Operand] = [found.projection.source.x, weight, found.stream]
    text = _options(e, operands, bias=bias, norm=norm)
    text += "" if found.scale == 1 else f", scale={number(found.scale)}"
    step.chosen.append((node, "linear_residual: projection and addition"))
    return e.emit(f"linear_residual({{0}}, {{1}}, {{2}}{text})", *operands, name="x", replaces=2)


def _attention(e: StepEmitter, found: patterns.SelfAttention, step: Step) -> Var | None:
    node, parts = found.node, (found.q, found.k, found.v)
    biases = [h.projection.bias for h in parts if h.projection.bias is not None]
    weight = e.packed([h.projection.weight for h in parts], "qkv")
    bias = e.packed(biases, "qkv") if biases else None
    if weight is None or (biases and bias is None):
        step.chosen.append((node, "queries, keys and values do not stand side by side"))
        return None
    norm = e.norm(found.q.projection.source)
    head_norms = [None if h.norm is None else e.norm_node(h.norm) for h in parts[:2]]
    tables: tuple[Operand, ...] = ()
    if found.q.rope is not None:
        tables = _tables(e, found.q.rope)
    a, x = node.attrs, found.q.projection.source.x
    rolling = ", rolling=True" if a["window"] is not None else ""
    rolling += f", keep_first={a['keep_first']}" if rolling and a["keep_first"] else ""
    slot = Slot("cache", "", "")
    positions = query_positions(e)
    operands: list[Value | Operand] = [x, weight, slot, positions]
    text = _options(e, operands, bias=bias, norm=norm, q_norm=head_norms[0], k_norm=head_norms[1])
    if tables:
        text += _options(e, operands, cos=tables[0], sin=tables[1])
    assert found.q.rope is None or found.k.rope is not None
    text += ", interleaved=True" if found.q.rope is not None and found.q.rope.attrs["interleaved"] else ""
    qkv = f"norm_qkv({{0}}, {{1}}, {{2}}.k, {{2}}.v, {{3}}{text}{rolling})"
    more = "".join(f", {n}={number(a[n])}" for n in ("scale", "softcap") if a[n] is not None)
    more += f", window={a['window']}" if a["window"] is not None else ""
    more += _options(e, operands, sinks=None if node.operand("sinks") is None else e[_value(node, "sinks")])
    _within(e, (weight, norm, bias, *head_norms))
    step.chosen.append((node, "norm_qkv: norm, projections, rotation, cache; decode_attention: split keys"))
    kv = "{2}.k, {2}.v"
    made = e.emit(
        f"decode_attention({qkv}, {kv}, {{3}}{more}{rolling}).flatten(1)[:, None]", *operands, name="attended"
    )
    return made


def _value(node: Node, name: str) -> Value:
    value = node.operand(name)
    assert value is not None
    return value


def _tables(e: StepEmitter, rope: Node) -> tuple[Var, ...]:
    """cos and sin [batch, pairs] of the angles of the token of each row."""
    positions, frequencies = _value(rope, "positions"), _value(rope, "frequencies")
    amplitude = rope.attrs["amplitude"]
    text = "rotary({0}, {1})" if amplitude == 1 else f"rotary_scaled({{0}}, {{1}}, {number(amplitude)})"
    text = f"(table[:, 0, 0] for table in {text})"
    given = e[positions], e[frequencies]
    return e.hoist_many((text, *given), text, *given, names=("cos", "sin"))

"""From a graph to a program: every node is lowered by the first registered lowering that takes it."""

from __future__ import annotations

from collections.abc import Iterable

from weft.ir.graph import Graph, Node, Value
from weft.ir.op import Trait
from weft.passes import Trace, legalize, lookup

from ..program.emitter import Emitter
from ..program.positions import begin, end
from ..program.registry import LOWERINGS
from ..program.statements import Operand, ParamRef, Program, Statement, Submodule
from ..program.states import cached_nodes, counts_keys, cross_attentions
from .encoder import within_encoder
from .identifiers import with_identifiers


def refusals(node: Node) -> list[str] | None:
    """List why each lowering refuses `node`; None if one accepts."""
    reasons = []
    for candidate in LOWERINGS.get(node.op.name, []):
        reason = candidate.when(node)
        if reason is None:
            return None
        reasons.append(f"{candidate.name}: {reason}")
    return reasons or ["no lowering is registered"]


def lower(graph: Graph, trace: Trace | None = None) -> Program:
    """The program of `graph`, whose ops are legal afterwards (their bodies take the place of what has no lowering).

    A graph of a decoder without caches also gets them: its program keeps, where it is given a cache, what tokens of
    later calls need.

    Raises:
        WeftError: naming an op that cannot be written.
    """
    graph = legal(graph, trace or Trace())
    cached = cached_nodes(graph)
    emitter = Emitter(graph, cached, counts_keys(graph, cached), cross_attentions(graph, cached))
    begin(emitter)
    head = _head(graph) if emitter.cached else None
    for node in list(graph.nodes):
        emitter.enter(node)
        chosen = next(c for c in LOWERINGS[node.op.name] if c.when(node) is None)
        emitted = chosen.emit(emitter, node)
        if emitted is not None:
            results = list(emitted) if isinstance(emitted, Iterable) else [emitted]
            for value, operand in zip(node.outputs, results, strict=True):
                emitter[value] = operand
        if head is not None and head[0] in node.outputs:
            _pick_last(emitter, *head)
    emitter.leave()
    program = emitter.program
    program.outputs = {name: emitter[value] for name, value in graph.outputs.items()}
    program.statements = within_encoder(program, end(emitter, needed(program)))
    read = read_weights(program)
    program.weights = {key: p for key, p in program.weights.items() if key in read}
    return program


def legal(graph: Graph, trace: Trace) -> Graph:
    """A copy of `graph` whose ops all have lowerings; sums stand apart from their norms, each in its own layer.

    Raises:
        WeftError: naming an op that cannot be written.
    """
    graph = with_identifiers(graph.clone())
    lookup("unfuse-residual-norm")().run(graph, trace)
    legalize(graph, refusals, trace)
    return graph


def read_weights(program: Program) -> set[str]:
    """The keys of the weights that statements or outputs read."""
    operands = [o for s in program.statements for o in s.operands] + list(program.outputs.values())
    leaves = {f"{o.path}.{name}" for o in operands if isinstance(o, Submodule) for name in o.holds}
    return leaves | {o.path for o in operands if isinstance(o, ParamRef)}


def _head(graph: Graph) -> tuple[Value, str] | None:
    """The last value before the logits that mixes more than the numbers of one token, and the scope that reads it."""
    value = graph.outputs.get("logits")
    scope = ""
    while value is not None and value.producer is not None and len(value.uses) <= 1:
        node = value.producer
        read = [v for v in node.inputs if v is not None and v.producer is not None]
        if any(part.isdigit() for part in node.scope.split(".")):
            break  # within a layer, which then would be unlike the others
        alone = Trait.ROWWISE in node.op.traits or Trait.ELEMENTWISE in node.op.traits
        if not alone or len(read) != 1 or len(read[0].uses) != 1 or read[0].shape[:-1] != value.shape[:-1]:
            break
        value, scope = read[0], node.scope
    return None if value is None or value is graph.outputs["logits"] or len(value.shape) != 3 else (value, scope)


def _pick_last(emitter: Emitter, value: Value, scope: str) -> None:
    """Let what follows `value` see one token of each row, where the model is told which."""
    emitter.scope, operand = scope, emitter[value]
    last = emitter.give("last", "None", "Tensor | None")
    emitter[value] = emitter.emit("{0} if {1} is None else last_rows({0}, {1})", operand, last, name="x", replaces=0)


def needed(program: Program) -> list[Statement]:
    """The statements that outputs depend on, in order."""
    needed: set[Operand] = set(program.outputs.values())
    statements = []
    for s in reversed(program.statements):
        if not s.results or needed.intersection(s.results):
            statements.append(s)
            needed.update(s.operands)
    statements.reverse()
    return statements

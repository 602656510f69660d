"""Lower a graph to a program: every node by the first registered lowering that accepts it. Statements that only the
encoder needs move into the encoder, because forward passes on later tokens do not run it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node, Value
from weft.ir.op import Op, Trait
from weft.passes.edits.legalization import Accepts

from ..program.emitter import Emitter
from ..program.registry import LOWERINGS
from ..program.stateful_nodes import (
    add_cache_advance,
    begin_forward,
    find_cached_nodes,
    find_cross_attentions,
    find_key_bias_nodes,
)
from ..program.statements import TOP, Operand, ParamRef, Program, Statement, Submodule, Var, is_inside

E = TypeVar("E", bound=Emitter)


def list_refusals(node: Node, kernels: bool = True) -> list[str] | None:
    """Return each lowering's reason for refusing `node`, as "lowering: reason"; None if one of them accepts it. Without
    `kernels`, lowerings that call Triton kernels refuse every node."""
    reasons = []
    for candidate in LOWERINGS.get(node.op.name, []):
        reason = candidate.when(node) if kernels or not candidate.kernels else "it calls kernels of target torch"
        if reason is None:
            return None
        reasons.append(f"{candidate.name}: {reason}")
    return reasons or ["no lowering is registered"]


@dataclass(frozen=True)
class LoweredGraph:
    """A graph whose ops all have lowerings, and its program; with `float8_caches` its KV caches are in FP8."""

    graph: Graph
    program: Program
    float8_caches: bool = False


def lower(graph: Graph, float8_caches: bool = False) -> LoweredGraph:
    """Lower `graph`, which must be legalized to the form "model" of the target torch, to a program. The program of a
    decoder takes an optional cache of keys, values and states, which later forward passes continue. With
    `float8_caches`, keys and values are stored in FP8."""
    cached = find_cached_nodes(graph)
    crosses = find_cross_attentions(graph, cached)
    emitter = Emitter(graph, cached, find_key_bias_nodes(graph, cached), crosses, float8_caches)
    begin_forward(emitter)
    emit_nodes(emitter, graph, {}, find_last_mixing(graph) if emitter.cached else None)
    program = emitter.program
    program.outputs = {name: emitter[value] for name, value in graph.outputs.items()}
    program.statements = move_into_encoder(program, add_cache_advance(emitter, select_live_statements(program)))
    read = find_read_weights(program)
    # Some statements that read a weight turned out to be dead.
    program.weights = {key: p for key, p in program.weights.items() if key in read}
    return LoweredGraph(graph, program, float8_caches)


def emit_nodes(
    emitter: E,
    graph: Graph,
    fused: Mapping[Op, Callable[[E, Node], Operand | tuple[Operand, ...] | None]],
    head: tuple[Value, str] | None = None,
) -> None:
    """Emit every node of `graph` in order. `fused` maps an op to the function that emits its nodes; without one, or if
    it returns None, the first registered lowering that accepts the node emits it. `head`, if not None, is a result of
    `find_last_mixing`: nodes after its value compute only token ``last[i]`` of row i if ``last`` is passed."""
    for node in list(graph.nodes):
        emitter.enter(node)
        emitted: Operand | Iterable[Operand] | None = fused[node.op](emitter, node) if node.op in fused else None
        if emitted is None:
            # Again: an entry of `fused` that returned None may have changed the scope.
            emitter.enter(node)
            usable = (c for c in LOWERINGS[node.op.name] if emitter.calls_kernels or not c.kernels)
            chosen = next(c for c in usable if c.when(node) is None)
            emitted = chosen.emit(emitter, node)
        if emitted is not None:
            results = list(emitted) if isinstance(emitted, Iterable) else [emitted]
            for value, operand in zip(node.outputs, results, strict=True):
                emitter[value] = operand
        if head is not None and head[0] in node.outputs:
            _select_last_rows(emitter, *head)
    emitter.leave()


def make_refusal_check(graph: Graph, kernels: bool = True) -> Accepts:
    """Return a function that maps a node to None if a lowering accepts it, else to the reason of each lowering. It
    raises a WeftError if all refuse a node with a cache or state, which must not be expanded. `kernels`: as in
    `list_refusals`."""
    cached = {node.output.name for node in find_cached_nodes(graph)}

    def refuse(node: Node) -> list[str] | None:
        reasons = list_refusals(node, kernels)
        if reasons and node.output.name in cached:  # expanded into its body it would lose the state
            raise WeftError(f"target torch cannot keep the state of {node.op.name} (%{node.output.name}): {reasons[0]}")
        return reasons

    return refuse


def find_read_weights(program: Program) -> set[str]:
    """Return the state_dict keys of the weights that statements or outputs read."""
    operands = [o for s in program.statements for o in s.operands] + list(program.outputs.values())
    leaves = {f"{o.path}.{name}" for o in operands if isinstance(o, Submodule) for name in o.tensors}
    return leaves | {o.path for o in operands if isinstance(o, ParamRef)}


def find_last_mixing(graph: Graph) -> tuple[Value, str] | None:
    """Find the nodes before the logits, all outside of layers, that compute each token from this token alone. Return
    the value [batch, seq, dim] that the first of them reads, and its scope; None without logits or such nodes."""
    value = graph.outputs.get("logits")
    scope = ""
    while value is not None and value.producer is not None and len(value.uses) <= 1:
        node = value.producer
        read = [v for v in node.inputs if v is not None and v.producer is not None]
        if any(part.isdigit() for part in node.scope.split(".")):
            break  # inside a layer, whose class would then differ from the other layers
        by_token = Trait.ROWWISE in node.op.traits or Trait.ELEMENTWISE in node.op.traits
        if not by_token or len(read) != 1 or len(read[0].uses) != 1 or read[0].shape[:-1] != value.shape[:-1]:
            break
        value, scope = read[0], node.scope
    return None if value is None or value is graph.outputs["logits"] or len(value.shape) != 3 else (value, scope)


def _select_last_rows(emitter: Emitter, value: Value, scope: str) -> None:
    emitter.scope, operand = scope, emitter[value]
    last = emitter.declare_input("last", "None", "Tensor | None")
    emitter[value] = emitter.emit("{0} if {1} is None else last_rows({0}, {1})", operand, last, name="x", replaces=0)


def select_live_statements(program: Program, given: Collection[Operand] = ()) -> list[Statement]:
    """Return the statements that the outputs depend on, in order. Operands in `given` count as inputs: statements that
    only these need are left out. If `given` is empty, statements without results, such as the cache advance, stay."""
    needed: set[Operand] = set(program.outputs.values())
    statements = []
    for s in reversed(program.statements):
        if (not s.results and not given) or needed.intersection(s.results):
            statements.append(s)
            needed.update(o for o in s.operands if o not in given)
    statements.reverse()
    return statements


def move_into_encoder(program: Program, statements: list[Statement]) -> list[Statement]:
    """Return `statements` in order. Statements that depend on the encoder's inputs, and whose results only the encoder
    reads, are moved into its scope. Nothing changes unless exactly one top-level module reads the encoder's inputs."""
    skipped = {v for v in program.inputs if v.skips}
    scopes = {s.scope.partition(".")[0] for s in statements if not skipped.isdisjoint(s.operands)} - {TOP}
    if len(scopes) != 1:
        return statements
    (encoder,) = scopes
    within = {s for s in statements if s.scope == encoder or is_inside(s.scope, encoder)}
    for s in statements:
        if (s.scope == TOP or s in within) and not skipped.isdisjoint(s.operands):
            skipped.update(s.results)
    read: set[object] = {*program.outputs.values()}  # by statements outside of the encoder
    moved = []
    for s in reversed(statements):
        if s.scope == TOP and s.results and skipped.issuperset(s.results) and read.isdisjoint(s.results):
            s = replace(s, scope=encoder, early=False)
        elif s not in within:
            read.update(o for o in s.operands if isinstance(o, Var))
        moved.append(s)
    return moved[::-1]

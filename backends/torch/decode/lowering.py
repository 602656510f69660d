"""The statements of a decode step: calls of kernels for fused ops, else those of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.ir import ops
from weft.ir.graph import Graph, Node
from weft.ir.op import OPS
from weft.passes.analysis.states import specs
from weft.passes.edits.legalization import Accepts

from ..codegen.structure import Call, Loop, Method, structure
from ..lower.lower import Lowered, emit, last_mixed, needed, pick_last, refusals
from ..program.positions import rolled
from ..program.statements import TOP, Program
from ..program.states import cached_nodes
from . import tables
from .emitter import Choice, StepEmitter
from .registry import STEPS


@dataclass
class Step:
    """The program of a decode step, as classes in `method`, of the fused `graph`; `choices` tells of nodes with a
    kernel or a reason, and `kernels` has the text of those that are generated for the model, by name.

    `any_length`: nothing depends on how many tokens there were, other than the positions that it is given, in a step of
    one token. `reads_prompts`: it takes several tokens of each row that follow one another.
    """

    graph: Graph
    program: Program
    method: Method
    choices: list[Choice]
    any_length: bool
    reads_prompts: bool
    kernels: Mapping[str, str]


def refusal(graph: Graph) -> str | None:
    """Say why `graph` is not one that decode steps are made for; None if it is."""
    if graph.meta.get("kind") != "decoder":
        return "the model is not a decoder"
    if not cached_nodes(graph):
        return "the model keeps nothing from call to call"
    if "logits" not in graph.outputs:
        return f"its outputs are {', '.join(graph.outputs)}, not logits"
    more = set(graph.inputs) - {"input_ids", "position_ids"}
    return f"the model reads {', '.join(sorted(more))}" if more else None


def refused(graph: Graph) -> str:
    """Say why the model of `graph` has no decode step."""
    return refusal(graph) or "its states would not be those of the model"


def lower_step(model: Lowered, graph: Graph) -> Step | None:
    """The decode step of `model`, from its fused `graph`; None if its caches would not be those of the model."""
    head = last_mixed(graph)
    several = head is not None and reads_prompts(model.graph)
    emitter = StepEmitter(graph, model.program.functions, several, model.float8_caches)

    def pick(node: Node) -> None:
        if several and head is not None and head[0] in node.outputs:
            pick_last(emitter, *head)

    emit(emitter, graph, {OPS[name]: lowering.emit for name, lowering in STEPS.items()}, pick)
    program = emitter.program
    program.nodes = list(model.graph.nodes)
    program.outputs = {"logits": emitter[graph.outputs["logits"]]}
    program.statements = emitter.ended(needed(program))
    tables.made_once(program, emitter.most_tickets)
    asking = (s for s in program.statements if emitter.start in s.operands)
    any_length = all(s.text.startswith("decode_attention(") for s in asking)  # which asks for several tokens alone
    method = structure(program, borrows=True)
    if _nesting(method) != _nesting(structure(model.program)):
        return None
    return Step(graph, program, method, emitter.choices, any_length, several, emitter.kernels)


def _nesting(method: Method) -> object:
    """Return what `new_cache` of a method makes, with the scopes and names of states in the place of these."""
    found: list[object] = []
    for item in method.stateful:
        if isinstance(item, Loop):
            found.append(tuple(_nesting(call.callee) for call in item.calls))
        elif isinstance(item, Call):
            found.append(_nesting(item.callee))
        else:
            assert item.node is not None
            found.append((item.node.scope, *(spec.part for spec in specs(item.node))))
    alone = len(found) == 1 and (method.path != TOP or isinstance(method.stateful[0], Loop))
    return found[0] if alone else tuple(found)


def takes(graph: Graph) -> Accepts:
    """Return what tells of a node in the fused `graph` why no lowering of a decode step takes it; None if one does."""
    probe = StepEmitter(graph, {})

    def refuse(node: Node) -> list[str] | None:
        if node.op.name not in STEPS:
            return refusals(node)
        probe.enter(node)
        reason = STEPS[node.op.name].when(probe, node)
        return None if reason is None else [reason]

    return refuse


def reads_prompts(graph: Graph) -> bool:
    """Return whether steps of `graph` may take several tokens of each row: where all it keeps are keys and values of
    all positions, and each token goes the same way."""
    kept = cached_nodes(graph)
    plain = all(n.op is ops.attention and n.operand("v") is not None and rolled(n) is None for n in kept)
    return plain and not any(n.op in (ops.moe, ops.route) for n in graph.nodes)

"""The statements of a decode step: those of the kernels where a pattern fits, else those of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from weft.ir import ops
from weft.ir.graph import Graph, Node
from weft.ir.op import OPS
from weft.passes import Pipeline, Report, Trace, legalize, run_passes
from weft.passes.analysis.states import specs
from weft.passes.default import FUSE_DECODE
from weft.passes.library.cleanup.drop_dropout import drops

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
    kernel or a reason, `trace` what was fused and what was not, and `kernels` has the text of those that are generated
    for the model, by name.

    `any_length`: nothing depends on how many tokens there were, other than the positions that it is given, in a step of
    one token. `reads_prompts`: it takes several tokens of each row that follow one another.
    """

    graph: Graph
    trace: Trace
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


def lower_step(model: Lowered, styles: Mapping[str, str] = MappingProxyType({})) -> Step | str:
    """The decode step of `model`, with the same caches; or why there is none. Processes may share it, its modules
    divided as `styles` says by path."""
    if reason := refusal(model.graph):
        return reason
    if drops(model.legal):  # steps do not train
        model = replace(model, legal=run_passes(model.legal, "drop-dropout"))
    kept = nesting(structure(model.program))
    for moves in (True, False):  # what keeps a state moves where the states stay in their places
        step = _step(model, moves, styles)
        if nesting(step.method) == kept:
            return step
    return "its states would not be those of the model"


def nesting(method: Method) -> object:
    """Return what `new_cache` of a method makes, with the scopes and names of states in the place of these."""
    found: list[object] = []
    for item in method.stateful:
        if isinstance(item, Loop):
            found.append(tuple(nesting(call.callee) for call in item.calls))
        elif isinstance(item, Call):
            found.append(nesting(item.callee))
        else:
            assert item.node is not None
            found.append((item.node.scope, *(spec.part for spec in specs(item.node))))
    alone = len(found) == 1 and (method.path != TOP or isinstance(method.stateful[0], Loop))
    return found[0] if alone else tuple(found)


def _step(model: Lowered, moves: bool, styles: Mapping[str, str], prompts: bool = True) -> Step:
    several = prompts and reads_prompts(model.legal) and not styles
    graph, trace = fused(model.legal, shared=bool(styles))

    def emitter_of(graph: Graph) -> StepEmitter:
        return StepEmitter(graph, model.legal, model.program.functions, moves, styles, several)

    probe = emitter_of(graph)
    legalize(graph, lambda node: _refusals(probe, node), trace)
    emitter = emitter_of(graph)
    head = last_mixed(graph) if several else None

    def pick(node: Node) -> None:
        if head is not None and head[0] in node.outputs:
            pick_last(emitter, *head)

    emit(emitter, graph, {OPS[name]: lowering.emit for name, lowering in STEPS.items()}, pick)
    last = emitter.give("last", "None", "Tensor | None") if several else None
    program = emitter.program
    program.outputs = {"logits": emitter[graph.outputs["logits"]]}
    program.statements = emitter.ended(needed(program))
    tables.made_once(program, emitter.most_tickets)
    if several and not any(o is last for s in program.statements for o in s.operands):
        return _step(model, moves, styles, prompts=False)  # the head cannot be asked for one token
    asking = (s for s in program.statements if emitter.start in s.operands)
    any_length = all(s.text.startswith("decode_attention(") for s in asking)  # which asks for several tokens alone
    method = structure(program, borrows=True)
    return Step(graph, trace, program, method, emitter.choices, any_length, several, emitter.kernels)


def fused(graph: Graph, shared: bool = False) -> tuple[Graph, Trace]:
    """The graph of a decode step of `graph`, which processes may share, and what was fused."""
    report, phase = Report(), FUSE_DECODE
    if shared:  # which divide weights, each by itself
        phase = replace(phase, passes=tuple(p for p in phase.passes if p.name != "pack-linears"))
    made = run_passes(graph, Pipeline((phase,)), report=report)
    trace = Trace()
    for record in report.records:
        trace.lines += record.trace.lines
        trace.refusals += record.trace.refusals
        for at, miss in record.trace.near.items():
            if at not in trace.near or miss.depth > trace.near[at].depth:
                trace.near[at] = miss
    return made, trace


def _refusals(e: StepEmitter, node: Node) -> list[str] | None:
    """List why no lowering of a decode step takes `node`; None if one does."""
    if node.op.name in STEPS:
        e.enter(node)
        reason = STEPS[node.op.name].when(e, node)
        return None if reason is None else [reason]
    return refusals(node)


def reads_prompts(graph: Graph) -> bool:
    """Return whether steps of `graph` may take several tokens of each row: where all it keeps are keys and values of
    all positions, and each token goes the same way."""
    kept = cached_nodes(graph)
    plain = all(n.op is ops.attention and n.operand("v") is not None and rolled(n) is None for n in kept)
    return plain and not any(n.op in (ops.moe, ops.route) for n in graph.nodes)

"""The statements of a decode step: those of the kernels where a pattern fits, else those of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from weft.ir import ops
from weft.ir.graph import Graph, Node, Value
from weft.ir.op import Op
from weft.passes import run_passes
from weft.passes.library.cleanup.drop_dropout import drops

from ..codegen.structure import Call, Loop, Method, structure
from ..lower.lower import Lowered, emit, last_mixed, needed, pick_last
from ..program.positions import rolled
from ..program.statements import TOP, Program, Var
from ..program.states import cached_nodes
from . import patterns, tables
from .emitter import Choice, StepEmitter
from .gates import single
from .kernels import attention, beginning, mixtures, products, recurrences

Fused = Callable[[StepEmitter, Node], "Var | tuple[Var, ...] | None"]


@dataclass
class Step:
    """The program of a decode step, as classes in `method`; `choices` tells of nodes with a kernel or a reason, and
    `kernels` has the text of those that are generated for the model, by name.

    `any_length`: nothing depends on how many tokens there were, other than the positions that it is given, in a step of
    one token. `reads_prompts`: it takes several tokens of each row that follow one another.
    """

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
    """Return what `new_cache` of a method makes, with the scopes and ops of what keeps states in the place of these."""
    found: list[object] = []
    for item in method.stateful:
        if isinstance(item, Loop):
            found.append(tuple(nesting(call.callee) for call in item.calls))
        elif isinstance(item, Call):
            found.append(nesting(item.callee))
        else:
            assert item.node is not None
            found.append((item.node.scope, item.node.op.name))
    alone = len(found) == 1 and (method.path != TOP or isinstance(method.stateful[0], Loop))
    return found[0] if alone else tuple(found)


def _step(model: Lowered, moves: bool, styles: Mapping[str, str], prompts: bool = True) -> Step:
    several = prompts and reads_prompts(model.legal) and not styles
    emitter = StepEmitter(model.legal, model.program.functions, moves, styles, several)
    head = last_mixed(model.legal) if several else None

    def pick(node: Node) -> None:
        if head is not None and head[0] in node.outputs:
            pick_last(emitter, *head)

    emit(emitter, model.legal, FUSED, pick)
    last = emitter.give("last", "None", "Tensor | None") if several else None
    program = emitter.program
    program.outputs = {"logits": emitter[model.legal.outputs["logits"]]}
    statements = beginning.with_angles(products.side_by_side(emitter, needed(program)))
    program.statements = emitter.ended(statements)
    tables.made_once(program, emitter.most_tickets)
    if several and not any(o is last for s in program.statements for o in s.operands):
        return _step(model, moves, styles, prompts=False)  # the head cannot be asked for one token
    made_by = {s.node for s in program.statements}
    # Choices for statements that nothing needed in the end are dropped with them.
    choices = [choice for choice in emitter.choices if choice.node in made_by]
    asking = (s for s in program.statements if emitter.start in s.operands)
    any_length = all(s.text.startswith("decode_attention(") for s in asking)  # which asks for several tokens alone
    return Step(program, structure(program, borrows=True), choices, any_length, several, emitter.kernels)


def reads_prompts(graph: Graph) -> bool:
    """Return whether steps of `graph` may take several tokens of each row: where all it keeps are keys and values of
    all positions, and each token goes the same way."""
    kept = cached_nodes(graph)
    plain = all(n.op is ops.attention and n.operand("v") is not None and rolled(n) is None for n in kept)
    return plain and not any(n.op in (ops.moe, ops.route) for n in graph.nodes)


def _norm(e: StepEmitter, node: Node) -> Var | None:
    """A norm that not only kernels read; or that of a recurrence, with it."""
    if (made := recurrences.ended(e, node)) is not None:
        return made
    e.enter(node)
    if not patterns.is_norm(node) or node.inputs[0] is None:
        return None
    norm = e.norm(node)
    assert norm is not None
    e.within(norm)
    return e.emit("{1}({0})", node.inputs[0], norm)


def _sum(e: StepEmitter, node: Node) -> Var | None:
    """A sum of what projections and experts add to a residual stream; or of embeddings."""
    if (made := beginning.begins(e, node)) is not None:
        return made
    values = patterns.terms(node) or []
    added = {v: a for v in values if (a := patterns.added(v)) is not None}
    mixed = {v: m for v in values if isinstance(m := patterns.mixture(v), patterns.Mixture) and single(v)}
    plain = [v for v in values if v not in added and v not in mixed]
    # A value that is added twice would count once below, where values are keys.
    if len(plain) == len(values) or len({*values}) != len(values):
        return None
    if not plain and not mixed:  # one of the projections is the stream
        plain.append(next(iter(added)))
        del added[plain[0]]
    total: Value | Var | None = plain[0] if plain else None
    for value in plain[1:]:
        assert total is not None
        total = e.emit("{0} + {1}", total, value, replaces=0)
    for mixture in mixed.values():
        total = mixtures.mixed(e, mixture, total)
    for projection in added.values():
        assert total is not None
        total = products.added(e, total, projection)
    assert isinstance(total, Var)
    return total


FUSED: dict[Op, Fused] = {
    **dict.fromkeys((ops.attention, ops.relative_attention), attention.attention),
    ops.lightning_index: attention.index,
    ops.add: _sum,
    **dict.fromkeys((ops.embedding, ops.affine), beginning.begins),
    ops.moe: mixtures.mixture,
    ops.mul: recurrences.ended,
    ops.glu: products.gated,
    ops.head_linear: products.by_head,
    ops.linear: products.linear,
    ops.rms_norm: _norm,
    ops.layer_norm: _norm,
    **dict.fromkeys((ops.relu, ops.relu2, ops.tanh, ops.sigmoid, ops.gelu, ops.swish), products.activated),
    **dict.fromkeys(recurrences.KERNELS, recurrences.recurrence),
    ops.scan: recurrences.scan,
}

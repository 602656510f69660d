"""Lower a fused graph to the statements of a decode step: kernel calls, or PyTorch where no kernel exists. Constant
tables are computed once, not for every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.ir import ops
from weft.ir.graph import Graph, Node
from weft.ir.op import OPS
from weft.passes.analysis.states import find_specs
from weft.passes.edits.legalization import Accepts

from ..codegen.method_writer import write_attribute
from ..codegen.structure import Loop, Method, ModuleCall, group_statements
from ..lower.lower import LoweredGraph, emit_nodes, find_last_mixing, list_refusals, select_live_statements
from ..program.stateful_nodes import add_cache_advance, find_cached_nodes, find_rolling_capacity
from ..program.statements import TOP, Operand, ParamRef, Program, Statement, Submodule, Var
from .step_emitter import STEPS, TICKETS, Implementation, StepEmitter


@dataclass
class DecodeStep:
    """A decode step of the fused `graph`: its statements as a `program`, and the same grouped into classes as `method`.
    choices: for each node the kernel that computes it, or the reason why none does. any_length: steps of one token
    launch the same kernels at any sequence length. reads_prompts: it may take several consecutive tokens per batch row.
    kernels: name → source of each kernel generated for this model."""

    graph: Graph
    program: Program
    method: Method
    choices: list[Implementation]
    any_length: bool
    reads_prompts: bool
    kernels: Mapping[str, str]


def find_refusal(graph: Graph) -> str | None:
    """Return None, or the reason (str) why the model of `graph` has no decode step."""
    if graph.meta.get("kind") != "decoder":
        return "the model is not a decoder"
    if not find_cached_nodes(graph):
        return "the model has no cache or state"
    if "logits" not in graph.outputs:
        return f"its outputs are {', '.join(graph.outputs)}, not logits"
    extra = set(graph.inputs) - {"input_ids", "position_ids"}
    return f"the model reads {', '.join(sorted(extra))}" if extra else None


def explain_refusal(graph: Graph) -> str:
    """Return the reason why the model of `graph`, which must have no decode step, has none."""
    return find_refusal(graph) or "its caches would be nested differently than those of model.py"


def lower_step(model: LoweredGraph, graph: Graph) -> DecodeStep | None:
    """Return the decode step of `model` from its fused `graph`; None if it nests the cache differently than `model`."""
    head = find_last_mixing(graph)
    several = head is not None and can_read_prompts(model.graph)
    emitter = StepEmitter(graph, model.program.functions, several, model.float8_caches)
    fused = {OPS[name]: lowering.emit for name, lowering in STEPS.items()}
    emit_nodes(emitter, graph, fused, head if several else None)
    program = emitter.program
    program.nodes = list(model.graph.nodes)
    program.outputs = {"logits": emitter[graph.outputs["logits"]]}
    program.statements = add_cache_advance(emitter, select_live_statements(program))
    move_tables(program, emitter.most_tickets)
    readers = (s for s in program.statements if emitter.start in s.operands)
    # decode_attention reads `start` only for several tokens.
    any_length = all(s.text.startswith("decode_attention(") for s in readers)
    method = group_statements(program, borrows=True)
    if _nest_states(method) != _nest_states(group_statements(model.program)):
        return None
    return DecodeStep(graph, program, method, emitter.choices, any_length, several, emitter.kernels)


def _nest_states(method: Method) -> object:
    """Return the nested tuples that `new_cache` of `method` builds, with (scope, *state names) instead of a cache."""
    nested: list[object] = []
    for item in method.stateful:
        if isinstance(item, Loop):
            nested.append(tuple(_nest_states(call.callee) for call in item.calls))
        elif isinstance(item, ModuleCall):
            nested.append(_nest_states(item.callee))
        else:
            assert item.node is not None
            nested.append((item.node.scope, *(spec.part for spec in find_specs(item.node))))
    single = len(nested) == 1 and (method.path != TOP or isinstance(method.stateful[0], Loop))
    return nested[0] if single else tuple(nested)


def make_refusal_check(graph: Graph) -> Accepts:
    """Return a function that maps a node of the fused `graph` to the reasons why no step can compute it, or to None."""
    probe = StepEmitter(graph, {})

    def refuse(node: Node) -> list[str] | None:
        if node.op.name not in STEPS:
            return list_refusals(node)
        probe.enter(node)
        reason = STEPS[node.op.name].when(probe, node)
        return None if reason is None else [reason]

    return refuse


def can_read_prompts(graph: Graph) -> bool:
    """Return whether decode steps of the model `graph` can take several tokens per batch row: its only states are KV
    caches that do not roll, of attentions with an operand v, and it has no mixture of experts."""
    if any(n.op in (ops.moe, ops.route) for n in graph.nodes):
        return False
    states = find_cached_nodes(graph)
    return all(
        n.op is ops.attention and n.operand("v") is not None and find_rolling_capacity(n) is None for n in states
    )


def move_tables(program: Program, tickets: int) -> None:
    """Convert hoisted statements of `program` to attributes of the step, computed once, if they read only constants and
    the device of the tokens. The attribute ``tickets`` gets `tickets` counters per batch row, with
    which blocks of a kernel synchronize."""
    tokens = next(v for v in program.inputs if v.name == "input_ids")
    tables: dict[Operand, Submodule] = {TICKETS: replace(TICKETS, init=f"Tickets({tickets})")}
    readers: dict[Operand, set[str]] = {}
    for s in program.statements:
        for o in s.operands:
            readers.setdefault(o, set()).add(s.scope)
    remaining = []
    for s in program.statements:
        text = _write_module_expression(s, tokens, tables)
        if text is None or len(s.results) != 1 or s.results[0] in program.outputs.values():
            remaining.append(s)
            continue
        number = sum(leaf.path.startswith(f"{s.results[0].name}.table") for leaf in tables.values())
        init = text.replace("{", "{{").replace("}", "}}")  # an expression without placeholders
        table = Submodule(f"{s.results[0].name}.table{number or ''}", init)
        if readers.get(s.results[0], {TOP}) == {TOP}:
            tables[s.results[0]] = table
        else:  # inner classes get it as an argument
            remaining.append(replace(s, text="{0}", operands=(table,)))
    program.statements = [replace(s, operands=tuple(tables.get(o, o) for o in s.operands)) for s in remaining]


def _write_module_expression(s: Statement, tokens: Var, tables: dict[Operand, Submodule]) -> str | None:
    """Return `s` as an expression over the model ``module``; None if `s` reads other operands or is not hoisted."""
    if s.scope != TOP or not s.early or not s.operands:
        return None
    texts = []
    for i, o in enumerate(s.operands):
        if o in tables:
            texts.append(tables[o].init.format())
        elif isinstance(o, ParamRef) and o.constant:
            texts.append(write_attribute("module", o.path))
        elif o is tokens and s.text.count(f"{{{i}}}") == s.text.count(f"{{{i}}}.device"):
            texts.append("next(module.parameters())")
        else:
            return None
    return s.text.format(*texts)

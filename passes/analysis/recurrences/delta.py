"""Detect delta-rule states, whose update depends on a product with the old state: S ← a ⊙ S + k (v + c wᵀS)ᵀ.

wᵀS of a token depends on earlier tokens only. The products wᵀS of all tokens in a chunk are the solution of one
triangular system (Yang 2024, arXiv 2406.06484).
"""

from __future__ import annotations

from dataclasses import replace

from weft.ir import Graph, Value, ops
from weft.ir.graph.step import BATCH, NEXT, Step, find_live_nodes

from .affine import AffineRules, AffineValue, copy_into, find_affine_form, has_dependent
from .outer import (
    ParallelForm,
    StateRead,
    StateView,
    copy_value_into,
    depends_on_gates,
    extract_outer,
    match_read,
    prune,
)
from .rows import is_rowwise

READ = "seen"  # the graph input that replaces the read wᵀS of the state and is passed like a token


def find_delta_form(step: Step) -> ParallelForm | None:
    """Return the parallel form of `step` if its only state S is updated as S ← a ⊙ S + k (v + c wᵀS)ᵀ, else None."""
    if len(step.states) != 1 or READ in step.graph.inputs or not all(map(is_rowwise, step.graph.nodes)):
        return None
    (name,) = step.states
    state_read = _find_read(step, name)
    form = None if state_read is None else find_affine_form(_replace_read(step, state_read))
    if state_read is None or form is None:
        return None
    gates, after = form.gates.clone(), form.after.clone()
    outer = extract_outer(step, name, gates, after)
    if outer is None or after.inputs[READ].uses:
        return None
    layout = StateView(step.graph.inputs[name].shape, outer.order)
    query, axis = state_read.query, state_read.axis
    if axis != layout.at_keys or query.shape[layout.at_values] != 1 or not depends_on_gates(query, gates):
        return None
    values = _find_affine_value(gates, gates.outputs[f"v.{name}"])
    if values is None or values.a is None or values.b is None or values.a.shape[-1] != 1:
        return None
    gates.outputs[f"v.{name}"] = values.b
    gates.add_output(f"c.{name}", ops.expand(values.a, shape=(BATCH, layout.groups, 1)))
    gates.add_output(f"w.{name}", layout.flatten(copy_value_into(query, gates, {}), axis))
    if has_dependent(gates.inputs[READ], gates.outputs.values()):
        return None
    return ParallelForm(prune(gates), prune(after), {name: replace(outer, changes=True)})


def _find_read(step: Step, name: str) -> StateRead | None:
    """Return the read of the state `name` in its update; None unless it is the only one and the rest is affine."""
    graph = step.graph.clone()
    state, new = graph.inputs[name], graph.outputs[NEXT + name]
    rules, reads = AffineRules(graph.inputs[step.tokens[0]]), list[StateRead]()
    forms = {state: AffineValue(name, state.shape)}
    for node in find_live_nodes(graph, [new]):
        if forms.keys().isdisjoint(node.inputs):
            continue
        if all(forms[v].b is None for v in node.inputs if v in forms):
            state_read = match_read(node, forms, rules)
            if state_read is not None:
                reads.append(state_read)
                continue
        if (form := rules.derive_form(node, forms)) is not None:
            forms[node.output] = form
        else:
            return None
    return reads[0] if len(reads) == 1 else None


def _replace_read(step: Step, state_read: StateRead) -> Step:
    """Return a copy of `step` with the result of `state_read` replaced by a further token input, named `READ`."""
    graph, body = step.graph, Graph("step")
    node = next(n for n in graph.nodes if n.output.name == state_read.node.output.name)
    for name in (*step.states, *step.tokens):
        body.add_input(name, graph.inputs[name].type)
    mapped: dict[Value, Value] = {graph.inputs[name]: body.inputs[name] for name in body.inputs}
    mapped[node.output] = body.add_input(READ, node.output.type)
    copy_into(body, graph, step.constants, dict(graph.outputs), mapped)
    return Step(body, step.initial, (*step.tokens, READ))


def _find_affine_value(gates: Graph, values: Value) -> AffineValue | None:
    """Return `values` as a ⊙ r + b, where r is the input `READ` of `gates`; None if they are not affine in it."""
    seen = gates.inputs[READ]
    forms = {seen: AffineValue(READ, seen.shape)}
    AffineRules(next(iter(gates.inputs.values()))).add_forms_of(find_live_nodes(gates, [values]), forms)
    return forms.get(values)

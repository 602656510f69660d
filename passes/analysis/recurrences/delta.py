"""Detect states that a token reads before it changes them: S ← a ⊙ S + k (v + c wᵀS)ᵀ, as in the delta rule.

What a token reads, wᵀS, depends on the tokens before it only: in a chunk, all of it is one triangular system (Yang
2024, arXiv 2406.06484).
"""

from __future__ import annotations

from dataclasses import replace

from weft.ir import Graph, Value, ops
from weft.ir.graph.step import BATCH, NEXT, Step, live_nodes

from .affine import Diagonal, Rules, affine, copy_into, reaches
from .outer import Layout, Parallel, Reading, is_known, moved, outer_state, pruned, reading_of
from .rows import keeps_rows

SEEN = "seen"  # a token in the place of what is read from the state


def changing(step: Step) -> Parallel | None:
    """Return the parallel form of a `step` of one state that it reads once, by a product, and changes by products."""
    if len(step.states) != 1 or SEEN in step.graph.inputs or not all(map(keeps_rows, step.graph.nodes)):
        return None
    (name,) = step.states
    reading = _read_before(step, name)
    form = None if reading is None else affine(_given(step, reading))
    if reading is None or form is None:
        return None
    gates, after = form.gates.clone(), form.after.clone()
    outer = outer_state(step, name, gates, after)
    if outer is None or after.inputs[SEEN].uses:
        return None
    lay = Layout(step.graph.inputs[name].shape, outer.order)
    if reading.axis != lay.at_keys or reading.query.shape[lay.at_values] != 1 or not is_known(reading.query, gates):
        return None
    values = _of_what_is_seen(gates, gates.outputs[f"v.{name}"])
    if values is None or values.a is None or values.b is None or values.a.shape[-1] != 1:
        return None
    gates.outputs[f"v.{name}"] = values.b
    gates.add_output(f"c.{name}", ops.expand(values.a, shape=(BATCH, lay.groups, 1)))
    gates.add_output(f"w.{name}", lay.keys(moved(reading.query, gates, {})))
    if reaches(gates.inputs[SEEN], gates.outputs.values()):
        return None
    return Parallel(pruned(gates), pruned(after), {name: replace(outer, changes=True)})


def _read_before(step: Step, name: str) -> Reading | None:
    """The one sum over an axis of the state before a token that its new state depends on."""
    graph = step.graph.clone()
    state, new = graph.inputs[name], graph.outputs[NEXT + name]
    rules, forms, found = Rules(graph.inputs[step.tokens[0]]), {state: Diagonal(name, state.shape)}, list[Reading]()
    for node in live_nodes(graph, [new]):
        if forms.keys().isdisjoint(node.inputs):
            continue
        if all(forms[v].b is None for v in node.inputs if v in forms):
            reading = reading_of(node, forms, rules)
            if reading is not None:
                found.append(reading)
                continue
        if (form := rules.form(node, forms)) is not None:
            forms[node.output] = form
        else:
            return None
    return found[0] if len(found) == 1 else None


def _given(step: Step, reading: Reading) -> Step:
    """The step that is given what it reads from its state as a token."""
    graph, body = step.graph, Graph("step")
    node = next(n for n in graph.nodes if n.output.name == reading.node.output.name)
    for name in (*step.states, *step.tokens):
        body.add_input(name, graph.inputs[name].type)
    known: dict[Value, Value] = {graph.inputs[name]: body.inputs[name] for name in body.inputs}
    known[node.output] = body.add_input(SEEN, node.output.type)
    copy_into(body, graph, step.constants, dict(graph.outputs), known)
    return Step(body, step.initial, (*step.tokens, SEEN))


def _of_what_is_seen(gates: Graph, values: Value) -> Diagonal | None:
    """The `values` of keys as a ⊙ what is read + b."""
    seen = gates.inputs[SEEN]
    rules, forms, dependent = Rules(next(iter(gates.inputs.values()))), {seen: Diagonal(SEEN, seen.shape)}, {seen}
    for node in live_nodes(gates, [values]):
        read = dependent.intersection(v for v in node.inputs if v is not None)
        if read:
            dependent.update(node.outputs)
            if read <= forms.keys() and (form := rules.form(node, forms)) is not None:
                forms[node.output] = form
    return forms.get(values)

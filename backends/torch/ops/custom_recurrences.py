"""User-defined recurrences (`scan`): their step becomes functions of the generated model."""

from __future__ import annotations

import keyword
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial

from weft.ir import ops
from weft.ir.graph import Graph, Node
from weft.ir.graph.step import NEXT, Step
from weft.passes import Trace, legalize
from weft.passes.analysis.recurrences.affine import find_affine_form
from weft.passes.analysis.recurrences.delta import find_delta_form
from weft.passes.analysis.recurrences.linear import LinearPart, find_linear_parts
from weft.passes.analysis.recurrences.outer import OuterProductState, ParallelForm, derive_parallel_form
from weft.passes.analysis.states import find_specs
from weft.passes.library.cleanup.cse import Cse

from ..codegen.method_writer import MethodWriter
from ..codegen.structure import Method
from ..lower.identifiers import rename_for_python
from ..lower.lower import emit_nodes, list_refusals, select_live_statements
from ..program.emitter import Emitter
from ..program.registry import lowering
from ..program.snippets import RESERVED, read_library
from ..program.statements import TOP, Var
from .calls import FunctionCall
from .elementwise import format_number
from .recurrent import PAST, emit_recurrence

_GENERATED = re.compile(r"(a|b|c|k|v|w|q\d+|new|last|old|read\d+)_")  # prefixes of generated variables
MAX_ELEMENTS = 1 << 22  # state elements computed at once: they fit into the caches of a CPU


@lowering(ops.scan)
def _scan(e: Emitter, node: Node) -> tuple[Var, ...]:
    step: Step = node.attrs["step"]
    first, second = len(step.tokens), len(step.tokens) + len(step.constants)
    values = [v for v in node.inputs if v is not None]
    call = FunctionCall("scan")
    tokens, constants = ([call.placeholder(v) for v in part] for part in (values[:first], values[first:second]))
    specs = ((write_tuple([*map(str, spec.row_shape)]), format_number(spec.initial)) for spec in find_specs(node))
    starts = [f"({shape}, {initial})" for shape, initial in specs]
    function = add_step_function(e, step)
    call.add(function, write_tuple(starts), write_tuple(tokens), write_tuple(constants) if constants else "()", PAST)
    if (mask := e.padding_mask()) is not None:
        call.add_named(mask=mask)
    many, size = "", MAX_ELEMENTS
    if (form := find_affine_form(step)) is not None:
        chunks = derive_parallel_form(step, form)
        sizes = [spec.row_shape for spec in find_specs(node) if chunks.outer[spec.part] is None]
        elements = sum(math.prod(n for n in row if isinstance(n, int)) for row in sizes)
        many, size = _add_chunk_function(e, step, chunks, function), max(16, MAX_ELEMENTS // max(elements, 1))
    elif (delta := find_delta_form(step)) is not None:
        many = _add_chunk_function(e, step, delta, function)
    elif (parts := find_linear_parts(step)) is not None:
        many = _add_matrix_functions(e, parts, function)
    call.arguments += [f"many={many}", f"size={size}"] if many else []
    return emit_recurrence(e, node, call, len(step.outputs))


def add_step_function(e: Emitter, step: Step) -> str:
    """Add a function that computes one token of the recurrence `step` to the generated source, and return its name."""
    outputs = [*(NEXT + name for name in step.states), *step.outputs]
    doc = f"One token of a recurrence: the new {', '.join(step.states)} and the output {', '.join(step.outputs)} of"
    return e.add_function("step", write_function(step.graph, outputs, doc))


def write_tuple(texts: Sequence[str]) -> str:
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


# -- functions


class _FunctionEmitter(Emitter):
    """Collects the statements of a function that must not call kernels: folders for transformers contain none."""

    calls_kernels = False


class _FunctionWriter(MethodWriter):
    trains = False


def write_function(graph: Graph, outputs: Sequence[str], doc: str) -> str:
    """Return the source of a function ``{name}`` from the inputs of `graph` to a tuple of the outputs with the names
    `outputs`. The docstring of the function is `doc`, followed by the names and shapes of the inputs."""
    legal = graph.clone()
    rename_for_python(legal)
    legalize(legal, partial(list_refusals, kernels=False))
    Cse().run(legal, Trace())
    emitter = _FunctionEmitter(legal, set(), set())
    inputs = list(emitter.program.inputs)
    emit_nodes(emitter, legal, {})
    values = dict(zip(graph.outputs, legal.outputs.values(), strict=True))
    emitter.program.outputs = {name: emitter[values[name]] for name in outputs}
    method = Method(TOP, [*select_live_statements(emitter.program)], outputs=[*emitter.program.outputs.values()])
    names, lines = _FunctionWriter(method, [*inputs], None, False).write()
    shapes = [f"{n} [{', '.join(map(str, v.shape))}]" for n, v in zip(names, graph.inputs.values(), strict=True)]
    *lines, last = lines
    value = last.removeprefix("return ")
    returned = [*lines, f"return ({value},)" if len(outputs) == 1 else last]
    parameters, count = ", ".join(f"{name}: Tensor" for name in names), len(outputs)
    head = f"def {{name}}({parameters}) -> tuple[{', '.join(['Tensor'] * count)}]:"
    docstring = textwrap.fill(f'"""{doc} {", ".join(shapes)}."""', 112, break_long_words=False)
    return "\n    ".join([head, *docstring.splitlines(), *returned])


def _add_chunk_function(e: Emitter, step: Step, form: ParallelForm, function: str) -> str:
    """Add a function that runs the recurrence `step` on many tokens at once to the generated source; return its name.
    `form` has three parts: gates of each token, scans or outer products of the states, and outputs of each token.
    `function` is the name of the function for one token, which the docstring mentions."""
    names = _choose_variables(step)
    arguments = {"states": step.states, "tokens": step.tokens, "constants": step.constants}
    lines = [f"{write_tuple([names[n] for n in part])[1:-1]} = {kind}" for kind, part in arguments.items() if part]
    gates = {name: name.replace(".", "_", 1) for name in form.gates.outputs}
    doc = "Return the terms that tokens add to a recurrence that is affine in its state, given"
    gates_function = e.add_function("gates", write_function(form.gates, [*form.gates.outputs], doc))
    lines.append(f"{write_tuple([*gates.values()])[1:-1]} = {_write_by_token(gates_function, form.gates, step, names)}")
    variables = dict(names)
    for name, outer in form.outer.items():
        lines += _write_state(name, names[name], outer, gates)
        if outer is None:
            variables |= {f"new_{name}": f"new_{name}", name: f"old_{name}"}
        else:
            variables |= {f"read{i}_{name}": f"read{i}_{name}" for i in range(outer.reads)}
    for name, outer in form.outer.items():
        if outer is None and name in form.after.inputs:
            lines.append(f"old_{name} = states_before({names[name]}, new_{name})")
    if all(v.producer is None for v in form.after.outputs.values()):
        by_input = {v.name: variables[n] for n, v in form.after.inputs.items()}
        returned = write_tuple([by_input[v.name] for v in form.after.outputs.values()])
    else:
        doc = f"Return the output {', '.join(step.outputs)} of a token, given the new state or products with it:"
        after = e.add_function("outputs", write_function(form.after, [*form.after.outputs], doc))
        returned = _write_by_token(after, form.after, step, variables)
    states = write_tuple([f"last_{name}" for name in step.states])
    parameters = "states: Tensors, tokens: Tensors, constants: Tensors, mask: Tensor | None"
    head = f"def {{name}}({parameters}) -> tuple[Tensors, Tensors]:"
    doc = f"Run `{function}` on many tokens at once: the last states, and the outputs of all."
    return e.add_function("many_steps", "\n    ".join([head, f'"""{doc}"""', *lines, f"return {states}, {returned}"]))


def _add_matrix_functions(e: Emitter, parts: Mapping[str, LinearPart], function: str) -> str:
    """Return the source of a `partial` of `matrix_steps` that runs `function`, the step of one token, on many tokens.
    `parts` maps each state to the linear part of its step, a product with a matrix; a function is added for each."""
    doc = "Return the state {} after the linear part of one step of a recurrence, given"
    sources = {name: write_function(part.graph, ["next"], doc.format(name)) for name, part in parts.items()}
    factors = write_tuple([e.add_function(f"left_of_{name}", source) for name, source in sources.items()])
    axes = write_tuple([f"({part.order}, {part.columns})" for part in parts.values()])
    return f"partial(matrix_steps, {function}, {factors}, {axes})"


def _choose_variables(step: Step) -> dict[str, str]:
    """Map each state, token and constant of `step` to its variable in the function for many tokens. Variables differ
    from keywords, from each other, and from all other names in the function."""
    reserved, variables = {"states", "tokens", "constants", "mask", *RESERVED, *read_library()}, dict[str, str]()
    for name in (*step.states, *step.tokens, *step.constants):
        wanted = f"{name}_" if keyword.iskeyword(name) or name in reserved or _GENERATED.match(name) else name
        while wanted in variables.values():
            wanted += "_"
        variables[name] = wanted
    return variables


def _write_by_token(function: str, graph: Graph, step: Step, names: Mapping[str, str]) -> str:
    """Return the source of a `by_token` call, which runs `function` on all tokens at once. `function` computes `graph`
    for one token of `step`; `names` maps the inputs of `graph` to variables."""
    by_row = [names[n] for n in graph.inputs if n not in step.constants]
    shared = [names[n] for n in graph.inputs if n in step.constants]
    return f"by_token({function}, {write_tuple(by_row)}{f', {write_tuple(shared)}' if shared else ''})"


def _write_state(name: str, old: str, outer: OuterProductState | None, gates: Mapping[str, str]) -> list[str]:
    """Return the lines that compute the state `name` after all tokens, from the variable `old`. They also compute the
    state after each token, or if `outer` is not None (the state is a sum of outer products), only each token's reads of
    it. `gates` maps outputs of the graph of gates to variables."""
    a = gates.get(f"a.{name}")
    factor = "None" if a is None else f"fill_hidden({a}, mask, 1.0)"
    if outer is None:
        b = gates.get(f"b.{name}")
        term = "None" if b is None else f"fill_hidden({b}, mask, 0.0)"
        return [f"new_{name}, last_{name} = affine_states({factor}, {term}, {old})"]
    queries = write_tuple([gates[f"q{i}.{name}"] for i in range(outer.reads)])
    reads = write_tuple([f"read{i}_{name}" for i in range(outer.reads)])
    k = f"fill_hidden({gates[f'k.{name}']}, mask, 0.0)"
    arguments = f"{queries}, {k}, {gates[f'v.{name}']}, {factor}, {old}, {outer.order}"
    if outer.changes:
        arguments += f", {gates[f'w.{name}']}, {gates[f'c.{name}']}"
    return [f"{reads}, last_{name} = outer_products({arguments})"]

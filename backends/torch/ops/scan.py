"""Recurrences that a user writes: their step becomes a function of the model."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from weft.ir import ops
from weft.ir.graph import Graph, Node, Value
from weft.ir.graph.step import NEXT, Step
from weft.passes import Trace, legalize
from weft.passes.analysis.states import specs

from ..codegen.method_writer import Writer
from ..codegen.structure import Method
from ..lower.identifiers import with_identifiers
from ..lower.lower import emit, needed, refusals
from ..program.emitter import Emitter
from ..program.registry import lowering
from ..program.statements import TOP, Var
from .calls import Call
from .elementwise import number
from .recurrent import PAST, carried


@lowering(ops.scan)
def _scan(e: Emitter, node: Node) -> tuple[Var, ...]:
    step: Step = node.attrs["step"]
    first, second = len(step.tokens), len(step.tokens) + len(step.constants)
    values = [v for v in node.inputs if v is not None]
    call = Call("scan")
    tokens, constants = ([call.place(v) for v in part] for part in (values[:first], values[first:second]))
    starts = [f"({_tuple([str(n) for n in spec.row])}, {number(spec.initial)})" for spec in specs(node)]
    function = e.function("step", function_text(step.graph, [*step.outputs], step.states))
    call.give(function, f"first_states({PAST}, {tokens[0]}, {_tuple(starts)})", _tuple(tokens))
    if constants:
        call.give(_tuple(constants))
    if (mask := e.padding()) is not None:
        call.named(mask=mask)
    return carried(e, node, call, len(step.outputs))


def _tuple(texts: Sequence[str]) -> str:
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def function_text(graph: Graph, outputs: Sequence[str], states: Sequence[str]) -> str:
    """The Python function called ``{name}`` that computes the outputs `graph` from its inputs."""
    wanted = [*(NEXT + state for state in states), *outputs]
    legal = with_identifiers(graph.clone())
    legalize(legal, refusals, Trace())
    emitter = Emitter(legal, set(), set())
    given = list(emitter.program.inputs)
    emit(emitter, legal, {})
    made: dict[str, Value] = dict(zip(graph.outputs, legal.outputs.values(), strict=True))
    program = emitter.program
    program.outputs = {name: emitter[made[name]] for name in wanted}
    method = Method(TOP, [*needed(program)], outputs=[program.outputs[name] for name in wanted])
    names, lines = _Function(method, [*given], None, False).write()
    parameters = ", ".join(f"{name}: Tensor" for name in names)
    count = len(wanted)
    shapes = [f"{n} [{', '.join(map(str, v.shape))}]" for n, v in zip(names, graph.inputs.values(), strict=True)]
    doc = f"One token of a recurrence: {', '.join(shapes)} to the new {', '.join(states)} and {', '.join(outputs)}."
    head = f"def {{name}}({parameters}) -> tuple[{', '.join(['Tensor'] * count)}]:"
    quoted = textwrap.fill(f'"""{doc}"""', 112, break_long_words=False)
    return "\n    ".join([head, *quoted.splitlines(), *lines])


class _Function(Writer):
    """Writes a function, which holds nothing."""

    trains = False

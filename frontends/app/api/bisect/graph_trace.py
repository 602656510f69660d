"""Traces of graphs, by the float64 interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from weft.backends.alignment.traces import Constant, Operation, ValueTrace
from weft.ir import interpret
from weft.ir.graph import Graph, Node, Param
from weft.ir.interpreter import bind_inputs, run_node, widen
from weft.ir.recipes.readers import Array


def trace_graph(
    graph: Graph, inputs: Mapping[str, Array], step: Callable[[int, int], None] | None = None
) -> ValueTrace:
    """Return the trace of `graph` on `inputs`; `step` is called with the number of nodes that have run, and of all.

    Its labels are the modules of the checkpoint whose weights a node reads.
    """
    binding = bind_inputs(graph, {name: x.shape for name, x in inputs.items()})
    constants: dict[str, Constant] = {
        p.name: (p.type.concrete({}), partial(_load, p, graph)) for p in graph.params.values()
    }
    trace = ValueTrace(values={name: widen(x) for name, x in inputs.items()}, constants=constants, dtype="f64")

    def watch(node: Node, results: tuple[Array, ...]) -> None:
        reads, makes = (tuple("" if v is None else v.name for v in vs) for vs in (node.inputs, node.outputs))
        trace.values.update(zip(makes, results, strict=True))
        run = partial(_run, node, binding)
        trace.operations.append(Operation(node.op.name, makes[0], reads, makes, node.attrs, run))
        keys = {key for v in node.inputs if isinstance(v, Param) for key in v.recipe.sources()}
        if len(modules := {key.rpartition(".")[0] for key in keys}) == 1:
            trace.labels.setdefault(modules.pop(), makes[0])
        if step:
            step(len(trace.operations), len(graph))

    interpret(graph, inputs, watch=watch)
    trace.outputs = {name: v.name for name, v in graph.outputs.items() if v.name in trace.values}
    return trace


def _run(node: Node, binding: Mapping[str, int], operands: list[Array | None], attrs: Mapping[str, Any]) -> list[Array]:
    return [widen(x) for x in run_node(node.op, operands, attrs, binding)]


def _load(param: Param, graph: Graph) -> Array:
    return widen(param.recipe.evaluate(graph.reader))

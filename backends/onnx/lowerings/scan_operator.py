"""Lowering of user-defined recurrences to a Scan whose body is the step."""

from __future__ import annotations

from typing import Any

import onnx_ir as onnx

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.graph.step import NEXT, Step
from weft.passes import Trace, legalize

from ...target import Backend
from ..lowering import list_refusals, lowering, select_lowerings
from ..onnx_emitter import OnnxEmitter


def _build_step_graph(node: Node, target: Backend) -> Graph:
    """Return a copy of the step of the scan `node` as a graph that is legal for `target`. A constant of the step
    becomes a parameter if the scan's operand for it is one, else an input. Raises WeftError if the target cannot run an
    op of the step; the message names it."""
    step: Step = node.attrs["step"]
    constants = dict(zip(step.constants, node.inputs[len(step.tokens) :], strict=False))
    graph, new_values = Graph("step", node.graph.reader), dict[Value, Value]()
    for name, value in step.graph.inputs.items():
        constant = constants.get(name)
        if isinstance(constant, Param):  # so that a weight of a linear is stored in its kernel's layout
            new_values[value] = graph.add_param(name, constant.type, constant.recipe)
        else:
            new_values[value] = graph.add_input(name, value.type)
    for inner in step.graph.nodes:
        operands = [None if v is None else new_values[v] for v in inner.inputs]
        # ONNX requires that names differ between a graph and its subgraphs; outputs of the model reserve some.
        types, names = [v.type for v in inner.outputs], [f"{node.output.name}.{v.name}" for v in inner.outputs]
        copy = graph.add_node(inner.op, operands, inner.attrs, types, names)
        new_values.update(zip(inner.outputs, copy.outputs, strict=True))
    for name, value in step.graph.outputs.items():
        graph.add_output(name, new_values[value])
    legalize(graph, lambda inner: list_refusals(inner, target), Trace())
    return graph


def _find_refusal(node: Node, target: Backend) -> str | None:
    try:
        select_lowerings(_build_step_graph(node, target), target)
    except WeftError as error:
        return f"in its step {error}"
    return None


@lowering(ops.scan, when=_find_refusal)
def StepScan(e: OnnxEmitter, node: Node) -> list[onnx.Value]:
    step: Step = node.attrs["step"]
    body = _build_step_graph(node, e.target)
    chosen = {inner: choice.emit for inner, choice in select_lowerings(body, e.target).chosen.items()}
    first, second = len(step.tokens), len(step.tokens) + len(step.constants)
    values: list[Any] = [v for v in node.inputs if v is not None]
    constants = {n: e[v] for n, v in zip(step.constants, values[first:second], strict=True) if n in body.inputs}
    past = values[second:]
    states = [e[v] for v in past] or [_emit_initial_state(e, node, name) for name in step.states]

    def run(*inputs: onnx.Value) -> list[onnx.Value]:
        named_inputs = dict(zip((*step.states, *step.tokens), inputs, strict=True))
        outputs = dict(zip(body.outputs, e.emit_subgraph(body, {**named_inputs, **constants}, chosen), strict=True))
        # Each output of a subgraph must be the result of a separate node in it.
        return [e.op("Identity", outputs[name]) for name in (*(NEXT + s for s in step.states), *step.outputs)]

    state_types = [body.outputs[NEXT + s].type.dtype for s in step.states]
    tokens, stacked = ([v.type.dtype for v in vs] for vs in (values[:first], (body.outputs[n] for n in step.outputs)))
    types = [*state_types, *tokens], [*state_types, *stacked]
    results, count = e.scan(run, states, [e[v] for v in values[:first]], types), len(step.states)
    return [*results[count:], *(results[:count] if past else [])]


def _emit_initial_state(e: OnnxEmitter, node: Node, state: str) -> onnx.Value:
    step: Step = node.attrs["step"]
    type = step.input_type(state, node.output.shape[0])
    fill_value = onnx.tensor([step.initial[state]], dtype=onnx.DataType.from_numpy(type.dtype.numpy))
    return e.op("ConstantOfShape", e.shape(type.shape), value=fill_value)

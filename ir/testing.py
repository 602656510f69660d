"""Graphs built from the example cases of ops, for conformance tests of backends and passes."""

from __future__ import annotations

from collections.abc import Collection

from .graph import Graph, Value
from .graph.step import Step
from .op import Case, Op
from .ops.loops import cast_step
from .recipes import Source
from .recipes.readers import Array, MemoryReader
from .types import TensorType, dtypes
from .types.dtypes import DType


def build_node_graph(
    op: Op, case: Case, seed: int = 0, dtype: DType = dtypes.f32, weights: Collection[str] = ()
) -> tuple[Graph, dict[str, Array]]:
    """Return a graph that applies `op` once to the operands of `case`, drawn from `seed`, and its input arrays by name.

    Float inputs have the type `dtype`, but float64 arrays. Inputs are named like the operands (with the index appended
    if variadic), outputs y0, y1, …. Operands named in `weights` become parameters, read from memory, not inputs.
    """
    reader = MemoryReader({})
    graph = Graph(op.name, reader)
    feeds: dict[str, Array] = {}
    operands: list[Value | None] = []
    arrays, attrs = case.draw(seed), dict(case.attrs)
    if isinstance(step := attrs.get("step"), Step):  # states of the step stay f32
        attrs["step"] = cast_step(step, [dtype] * len(arrays))
    names = op.operand_names(arrays, attrs)
    for i, array in enumerate(arrays):
        if array is None:
            operands.append(None)
            continue
        operand = op.operands[min(i, len(op.operands) - 1)]
        name = f"{operand.name}{i}" if operand.variadic else operand.name
        kind = {"f": dtype, "b": dtypes.bool_}.get(array.dtype.kind, dtypes.i64)
        kind = dtypes.f32 if operand.variadic and names[i].startswith("past_") else kind
        type = TensorType(kind, array.shape)
        if operand.name in weights:
            reader.arrays[name] = array
            operands.append(graph.add_param(name, type, Source(name)))
            continue
        operands.append(graph.add_input(name, type))
        feeds[name] = array
    for i, value in enumerate(op.emit(*operands, **attrs)):
        graph.add_output(f"y{i}", value)
    return graph, feeds


def expand_bodies(graph: Graph) -> Graph:
    """Return a copy of `graph` with the body of its op in place of each node that has one; nodes in bodies stay."""
    copy = graph.clone()
    for node in list(copy.nodes):
        if node.op.has_body:
            with copy.inserting(before=node):
                copy.replace(node, *node.op.expand(node))
    return copy

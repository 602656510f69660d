"""Graphs made of the example cases of ops: what conformance tests of backends and passes run."""

from __future__ import annotations

from . import dtypes
from .archive import Array
from .dtypes import DType
from .graph import Graph, Value
from .op import Case, Op
from .types import TensorType


def one_node(op: Op, case: Case, seed: int = 0, dtype: DType = dtypes.f32) -> tuple[Graph, dict[str, Array]]:
    """A graph that applies `op` once to its inputs, and numbers for them: floats (float64) are declared as `dtype`.

    Inputs are called like the operands (numbered if variadic), outputs y0, y1, ….
    """
    graph = Graph(op.name)
    feeds: dict[str, Array] = {}
    operands: list[Value | None] = []
    for i, array in enumerate(case.draw(seed)):
        if array is None:
            operands.append(None)
            continue
        operand = op.operands[min(i, len(op.operands) - 1)]
        name = f"{operand.name}{i}" if operand.variadic else operand.name
        kind = {"f": dtype, "b": dtypes.bool_}.get(array.dtype.kind, dtypes.i64)
        operands.append(graph.add_input(name, TensorType(kind, array.shape)))
        feeds[name] = array
    for i, value in enumerate(op.emit(*operands, **case.attrs)):
        graph.add_output(f"y{i}", value)
    return graph, feeds


def expand(graph: Graph) -> Graph:
    """A copy of `graph` with every node whose op has a body replaced by it, once (not what the bodies contain)."""
    copy = graph.clone()
    for node in list(copy.nodes):
        if node.op.has_body:
            with copy.inserting(before=node):
                copy.replace(node, *node.op.expand(node))
    return copy

"""Values computed from positions alone: position tables, sinusoids, distance biases."""

from __future__ import annotations

from weft.ir import Graph, Node, Param, Value, ops


def positional(graph: Graph) -> set[Value]:
    """The values that depend on the input position_ids and on counts (iota) and on nothing else of the text."""
    found: set[Value] = {v for name, v in graph.inputs.items() if name == "position_ids"}
    for node in graph.nodes:
        given = {v for v in node.inputs if v is not None and not isinstance(v, Param)}
        if node.op is ops.iota or (given and given <= found):
            found.update(node.outputs)
    return found


def position_tables(graph: Graph) -> list[Node]:
    """The nodes `embedding` that look positions up in a table, a parameter."""
    places = positional(graph)
    return [n for n in graph.nodes if n.op is ops.embedding and n.inputs[0] in places and _is_table(n)]


def first_row(node: Node) -> int | None:
    """The row of its table where the node, one of `position_tables`, finds position 0; None if that cannot be told."""
    value, offset = node.inputs[0], 0
    while value is not None and (producer := value.producer) is not None and producer.op is not ops.iota:
        if producer.op is ops.affine and producer.attrs["by"] == 1 and float(producer.attrs["plus"]).is_integer():
            offset += int(producer.attrs["plus"])
        elif producer.op not in (ops.expand, ops.unsqueeze, ops.cast):
            return None
        value = producer.inputs[0]
    return offset


def _is_table(node: Node) -> bool:
    table = node.inputs[1]
    return isinstance(table, Param) and isinstance(table.shape[0], int)

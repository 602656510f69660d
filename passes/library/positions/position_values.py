"""Find values computed from positions only: rows of position tables, sinusoids, distance biases."""

from __future__ import annotations

from weft.ir import Graph, Node, Param, Value, ops


def find_position_values(graph: Graph) -> set[Value]:
    """Return the values that depend only on the input position_ids, on token counts (iota) and on parameters."""
    values: set[Value] = {v for name, v in graph.inputs.items() if name == "position_ids"}
    for node in graph.nodes:
        operands = {v for v in node.inputs if v is not None and not isinstance(v, Param)}
        if node.op is ops.iota or (operands and operands <= values):
            values.update(node.outputs)
    return values


def find_position_tables(graph: Graph) -> list[Node]:
    """Return the `embedding` nodes that look up positions in a table that is a parameter of fixed length."""
    values = find_position_values(graph)
    return [n for n in graph.nodes if n.op is ops.embedding and n.inputs[0] in values and _is_table(n)]


def find_first_row(node: Node) -> int | None:
    """Return the row of position 0 in the table of the position embedding `node`; None if it cannot be derived."""
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

"""Sums of many values, as chains of additions."""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir import Graph, Node, Value, ops


def find_sums(graph: Graph) -> Iterator[Node]:
    """Yield the last add or add_norm of each chain of additions. `graph` may be edited between yields."""
    for node in list(graph.nodes):
        if not node.erased and (node.op is ops.add_norm or (node.op is ops.add and not _is_inner_sum(node))):
            yield node


def find_summands(total: Node) -> list[Value]:
    """Return the summands of the sum that ends at the node `total`, except those of another type (they broadcast).

    An inner sum with several readers counts as one summand.
    """
    values: list[Value] = []
    for v in total.inputs[:2]:
        assert v is not None
        inner = v.producer is not None and v.producer.op is ops.add and _is_inner_sum(v.producer)
        values += find_summands(v.producer) if inner and v.producer else [v] if v.type == total.outputs[-1].type else []
    return values


def has_add_norm_reader(value: Value) -> bool:
    """Return whether an add_norm reads the summand `value`, which then cannot be removed: add_norm needs two."""
    return any(n.op is ops.add_norm for n in value.users)


def remove_summand(value: Value) -> None:
    """Remove the summand `value` from its sum: replace its only reader, an add, by the add's other operand."""
    (reader,) = value.users
    rest = next(v for v in reader.inputs if v is not value)
    assert rest is not None
    reader.output.replace_uses(rest)
    value.graph.erase(reader)


def _is_inner_sum(node: Node) -> bool:
    if node.output.is_output or len(node.output.uses) != 1:
        return False
    reader, index = node.output.uses[0]
    return reader.op is ops.add or (reader.op is ops.add_norm and index < 2)

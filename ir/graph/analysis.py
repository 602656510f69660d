"""Queries on graphs: the critical path, nodes by scope, structural hashes, total costs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import networkx as nx

from ..recipes.spelling import spell
from ..schema.op_schema import Cost
from ..types import sizes
from .graph import Graph, Node, Value


def find_critical_path(graph: Graph, binding: Mapping[str, int]) -> tuple[list[Node], int]:
    """Return (nodes, FLOPs) of the chain of dependent nodes with the most FLOPs; `binding` maps all named sizes."""
    view = graph.to_networkx()
    for source, _, data in view.edges(data=True):
        flops = source.op.node_cost(source).flops if isinstance(source, Node) else 0
        data["weight"] = sizes.evaluate(flops, binding)
    path = nx.dag_longest_path(nx.DiGraph(view), weight="weight")
    nodes = [n for n in path if isinstance(n, Node)]
    return nodes, sum(sizes.evaluate(n.op.node_cost(n).flops, binding) for n in nodes)


def group_by_scope(graph: Graph) -> dict[str, list[Node]]:
    """Map each scope to its nodes in graph order; scopes are in the order of their first nodes."""
    groups: dict[str, list[Node]] = {}
    for node in graph.nodes:
        groups.setdefault(node.scope, []).append(node)
    return groups


def hash_structure(nodes: Iterable[Node]) -> str:
    """Return a hash (16 hex digits) of `nodes` in order: ops, attributes, types and connections, but no names."""
    labels: dict[Value, str] = {}  # values are numbered by first appearance, so that names do not count

    def label(v: Value | None) -> str:
        return "_" if v is None else labels.setdefault(v, f"{len(labels)}:{v.type}")

    text = []
    for node in nodes:
        args = list(map(label, node.inputs))
        for v in node.outputs:
            label(v)
        attrs = ",".join(f"{k}={spell(a)}" for k, a in node.attrs.items())
        text.append(f"{node.op.name}({','.join(args)};{attrs})")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def sum_node_costs(nodes: Iterable[Node]) -> Cost:
    """Return the sum of the costs of `nodes`; zero without nodes."""
    return sum((node.op.node_cost(node) for node in nodes), Cost(0, 0, 0))


def select_explicit_attributes(node: Node) -> dict[str, Any]:
    """Return the attributes of `node` that differ from their defaults, as a dict from name to value."""
    return {k: v for k, v in node.attrs.items() if node.op.attrs[k].default != v}

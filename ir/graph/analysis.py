"""The analysis view of a graph: networkx does the graph algorithms."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import networkx as nx

from ..schema.op import Cost
from ..text.printer import format_attr
from ..types import sizes
from .graph import Graph, Node, Value


def to_networkx(graph: Graph) -> nx.MultiDiGraph:
    """Nodes, inputs, parameters and outputs as a multigraph; an edge per operand.

    Vertices are `Node`s, input and parameter `Value`s, and output names (str), each with `kind` and `label`; an edge
    carries `value` and operand `index`.
    """
    view: nx.MultiDiGraph = nx.MultiDiGraph(name=graph.name)
    for v in graph.inputs.values():
        view.add_node(v, kind="input", label=v.name)
    for p in graph.params.values():
        view.add_node(p, kind="param", label=p.name)
    for node in graph.nodes:
        view.add_node(node, kind="node", label=node.op.name, scope=node.scope)
        for i, operand in enumerate(node.inputs):
            if operand is not None:
                view.add_edge(operand.producer or operand, node, value=operand, index=i)
    for name, value in graph.outputs.items():
        view.add_node(name, kind="output", label=name)
        view.add_edge(value.producer or value, name, value=value, index=0)
    return view


def critical_path(graph: Graph, binding: Mapping[str, int]) -> tuple[list[Node], int]:
    """The chain of dependent nodes with the most FLOPs under `binding`, and that number."""
    view = to_networkx(graph)
    for source, _, data in view.edges(data=True):
        flops = source.op.node_cost(source).flops if isinstance(source, Node) else 0
        data["weight"] = sizes.evaluate(flops, binding)
    path = nx.dag_longest_path(nx.DiGraph(view), weight="weight")
    nodes = [n for n in path if isinstance(n, Node)]
    return nodes, sum(sizes.evaluate(n.op.node_cost(n).flops, binding) for n in nodes)


def scopes(graph: Graph) -> dict[str, list[Node]]:
    """Nodes by scope, in order of first appearance."""
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        found.setdefault(node.scope, []).append(node)
    return found


def block_hash(nodes: Iterable[Node]) -> str:
    """A hash of the structure of some nodes: equal for blocks that differ in names and weights only."""
    order: dict[Value, str] = {}
    text = []
    for node in nodes:
        args = []
        for v in node.inputs:
            if v is not None and v not in order:
                order[v] = f"{len(order)}:{v.type}"
            args.append("_" if v is None else order[v])
        for v in node.outputs:
            order[v] = f"{len(order)}:{v.type}"
        attrs = ",".join(f"{k}={format_attr(a)}" for k, a in node.attrs.items())
        text.append(f"{node.op.name}({','.join(args)};{attrs})")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def total_cost(nodes: Iterable[Node]) -> Cost:
    """Sum of the costs of some nodes."""
    total = Cost(0, 0, 0)
    for node in nodes:
        total = total + node.op.node_cost(node)
    return total


def attributes(node: Node) -> dict[str, Any]:
    """Attributes of a node that differ from their defaults."""
    return {k: v for k, v in node.attrs.items() if node.op.attrs[k].default != v}

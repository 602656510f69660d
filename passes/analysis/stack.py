"""The stacks of layers in a graph, known by scopes such as ``layers.3`` or ``decoder.layers.3``.

A layer is a run of nodes that takes the residual stream in as one value and hands it out as another; passes drop layers
and copy them, and number anew what is behind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Value, WeftError

from .memory import remembers

_LAYER = re.compile(r"((?:.*?\.)?layers)\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Layer:
    """Layer `number` of the stack whose scopes begin with `stack`: its `nodes` make `y` of `x`."""

    stack: str
    number: int
    nodes: tuple[Node, ...]
    x: Value
    y: Value


def stack_of(graph: Graph, name: str, rule: str) -> list[Layer]:
    """The layers of the stack called `name` (the only one if that is empty), in order.

    Raises:
        WeftError: in the name of the pass `rule`, if there are several or none, if the graph has caches, or if a layer
            makes something besides the residual stream that others read.
    """
    if remembers(graph):
        raise WeftError(f"{rule}: graph {graph.name} has caches already; run {rule} before kv-cache")
    found: dict[str, dict[int, list[Node]]] = {}
    for node in graph.nodes:
        if match := _LAYER.match(node.scope):
            found.setdefault(match[1], {}).setdefault(int(match[2]), []).append(node)
    if not found:
        raise WeftError(f"{rule}: graph {graph.name} has no layers: no scope is called layers.0")
    if (not name and len(found) > 1) or (name and name not in found):
        raise WeftError(f"{rule}: give stack= as one of {', '.join(found)}")
    stack = name or next(iter(found))
    layers: list[Layer] = []
    for number, nodes in sorted(found[stack].items()):
        y = _handed_on(nodes, f"{rule}: {stack}.{number}")
        x = layers[-1].y if layers else _taken_in(nodes, y, f"{rule}: {stack}.{number}")
        layers.append(Layer(stack, number, tuple(nodes), x, y))
    return layers


def _handed_on(nodes: Iterable[Node], where: str) -> Value:
    inside = set(nodes)
    made = [v for n in inside for v in n.outputs if v.is_output or any(u not in inside for u in v.users)]
    if len(made) != 1:
        names = ", ".join(f"%{v.name}" for v in made) or "nothing"
        raise WeftError(f"{where} hands on {names}, where a layer makes one value")
    return made[0]


def _taken_in(nodes: Iterable[Node], y: Value, where: str) -> Value:
    inside = set(nodes)
    read = {v: None for n in nodes for v in n.inputs if v is not None and not isinstance(v, Param)}
    found = [v for v in read if v.producer not in inside and v.type == y.type]
    if len(found) != 1:
        raise WeftError(f"{where} reads {', '.join(f'%{v.name}' for v in found) or 'nothing'} of the type of %{y.name}")
    return found[0]


def renumber(graph: Graph, stack: str, number: Mapping[int, int]) -> None:
    """Call layer i of `stack` `number[i]`, in scopes and in names of values and parameters."""
    layer = re.compile(rf"{re.escape(stack)}\.(\d+)(?=\.|$)")

    def renamed(text: str) -> str:
        match = layer.match(text)
        return f"{stack}.{number.get(int(match[1]), match[1])}{text[match.end() :]}" if match else text

    taken: set[str] = set()
    for node in graph.nodes:
        node.scope = renamed(node.scope)
    for value in [*graph.params.values(), *(v for n in graph.nodes for v in n.outputs)]:
        new = renamed(value.name)
        if new in taken:  # by a parameter that layers share, one of which is there no more
            new = graph.fresh(new)
        elif new != value.name:
            graph.fresh(new)  # no later value gets it
        taken.add(new)
        value.name = new
    graph.params = {p.name: p for p in graph.params.values()}


def unfuse(graph: Graph) -> bool:
    """Take every add_norm apart, the addition in the layer that ends with it; whether there was any."""
    fused = [n for n in graph.nodes if n.op.name == "add_norm"]
    for node in fused:
        with graph.inserting(before=node):
            normed, total = node.op.expand(node)
        graph.replace(node, normed, total)
        made = [v.producer.scope for v in node.inputs[:2] if v is not None and v.producer is not None]
        layers = {int(match[2]): f"{match[1]}.{match[2]}" for scope in made if (match := _LAYER.match(scope))}
        assert total.producer is not None
        total.producer.scope = layers[max(layers)] if layers else made[-1] if made else ""
    return bool(fused)

"""Small edits that passes share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.ir import Graph, Node, Param, Value


def hand_over(old: Value, new: Value, *, rename: bool = True) -> None:
    """Make everybody read `new` instead of `old`; with `rename`, `new` also takes the name of `old`."""
    old.replace_uses(new)
    if rename and new.producer is not None:
        old.name, new.name = new.name, old.name


def drop(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase those of `nodes` that nobody reads, then the parameters that only they read."""
    waiting = list(nodes)
    progress = True
    while progress:
        progress = False
        for node in list(waiting):
            if node.erased or not any(v.uses or v.is_output for v in node.outputs):
                waiting.remove(node)
                if not node.erased:
                    operands = node.inputs
                    graph.erase(node)
                    drop_params(graph, operands)
                    progress = True


def drop_params(graph: Graph, values: Iterable[Value | None]) -> None:
    """Erase the parameters among `values` that nobody reads any more."""
    for v in dict.fromkeys(values):
        if isinstance(v, Param) and graph.params.get(v.name) is v and not v.uses and not v.is_output:
            graph.erase_param(v)


def made_of(values: Iterable[Value], known: Iterable[Value | None]) -> list[Node]:
    """The nodes between `known` and `values`: all that `values` are computed with, not looking behind `known`."""
    stop, found, stack = set(known), dict[Node, None](), list(values)
    while stack:
        value = stack.pop()
        if value in stop or value.producer is None or value.producer in found:
            continue
        found[value.producer] = None
        stack += [v for v in value.producer.inputs if v is not None]
    return list(found)


def common_scope(names: Sequence[str]) -> str:
    """The longest dotted prefix that all names share."""
    shared: list[str] = []
    for parts in zip(*(n.split(".") for n in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)

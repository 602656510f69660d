"""Layers: the stacks of a graph, known by scopes such as ``layers.3``, and the argument `layers` of passes.

A layer of a stack is a run of nodes that takes the residual stream in as one value and hands it out as another; passes
drop layers and copy them, and number anew what is behind.

The argument `layers` counts attentions of a text to itself, as caches are numbered; those of an encoder come before
those of its decoder. It is

- ``all``, ``even`` (0, 2, 4 …) or ``odd``,
- a number (-1 is the last layer), a list of them, or text such as ``"0-5, 8"``,
- a pattern that repeats: ``"local*5 + global"``, also written ``"5:1"``, are the first five of every six.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Value, WeftError, ops
from weft.ir.op import Trait

from .states import has_cache

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
    if has_cache(graph):
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
    # The keys are names, which have changed; the order stays.
    graph.params = {p.name: p for p in graph.params.values()}


def unfuse(graph: Graph) -> bool:
    """Take every add_norm apart, the addition in the layer that ends with it; whether there was any."""
    fused = [n for n in graph.nodes if n.op is ops.add_norm]
    for node in fused:
        with graph.inserting(before=node):
            normed, total = node.op.expand(node)
        graph.replace(node, normed, total)
        made = [v.producer.scope for v in node.inputs[:2] if v is not None and v.producer is not None]
        layers = {int(match[2]): f"{match[1]}.{match[2]}" for scope in made if (match := _LAYER.match(scope))}
        assert total.producer is not None
        # The addition belongs to the later of the layers that make its operands: it ends that layer.
        total.producer.scope = layers[max(layers)] if layers else made[-1] if made else ""
    return bool(fused)


Layers = str | int | tuple[int, ...]
ROLES = ("local", "global")


def self_attentions(graph: Graph, name: str) -> list[Node]:
    """The layers of `graph`: the softmax attentions whose keys are as many as their queries.

    Raises:
        WeftError: in the name of the pass `name`, if there are none, or if they have caches.
    """
    need_early(graph, name)
    found = [n for n in graph.nodes if Trait.ATTENTION in n.op.traits and _to_itself(n)]
    if not found:
        raise WeftError(f"{name}: graph {graph.name} has no softmax attention of a text to itself")
    return found


def need_early(graph: Graph, name: str) -> None:
    """Raise WeftError in the name of the pass `name` if `graph` has caches."""
    if has_cache(graph):
        raise WeftError(f"{name}: graph {graph.name} has caches already; run {name} before kv-cache")


def chosen(graph: Graph, layers: Layers, name: str) -> list[Node]:
    """The self-attentions of `graph` that `layers` says, in order.

    Raises:
        WeftError: in the name of the pass `name`, if `layers` cannot be read or a layer does not exist.
    """
    found = self_attentions(graph, name)
    try:
        return [found[i] for i in numbers(layers, len(found))]
    except WeftError as e:
        raise WeftError(f"{name}: {e}") from None


def numbers(layers: Layers, count: int) -> list[int]:
    """The layers, of `count`, that `layers` says, in order.

    Raises:
        WeftError: if it cannot be read, names a layer that does not exist, or says none.
    """
    wanted = list[int]()
    for i in _read(layers, count):
        if not -count <= i < count:
            raise WeftError(f"there is no layer {i}; the graph has layers 0 to {count - 1}")
        wanted.append(i)
    if not wanted:
        raise WeftError(f"layers={layers!r} says none of the layers 0 to {count - 1}")
    return sorted({i % count for i in wanted})


def _read(layers: Layers, count: int) -> Iterable[int]:
    """The numbers that `layers` says, as they are; of a range that goes too far they are not all made."""
    if not isinstance(layers, str):
        return [layers] if isinstance(layers, int) else layers
    text = layers.strip()
    if text in ("all", "even", "odd"):
        return range(text == "odd", count, 1 if text == "all" else 2)
    if any(role in text for role in ROLES) or ":" in text:
        return [i for i, role in enumerate(roles(text, count)) if role == "local"]
    return itertools.chain.from_iterable(_range(part.strip(), layers) for part in text.split(","))


def roles(pattern: str | Sequence[str], count: int) -> list[str]:
    """``local`` or ``global`` for each of `count` layers: `pattern`, as text or as a list of the two words, repeats.

    Raises:
        WeftError: if it cannot be read.
    """
    if isinstance(pattern, str):
        period = _ratio(pattern, count)
        if period is None:
            period = [role for part in pattern.split("+") for role in _repeated(part, pattern, count)]
    else:
        period = list(pattern)
    if not period or not set(period) <= set(ROLES):
        raise WeftError(f'pattern {pattern!r} is neither "5:1", "local*5 + global" nor a list of local and global')
    return list(itertools.islice(itertools.cycle(period), count))


def _ratio(text: str, count: int) -> list[str] | None:
    """Expand ``5:1``; at most `count` of each role."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*", text)
    if match is None:
        return None
    return ["local"] * min(int(match[1]), count) + ["global"] * min(int(match[2]), count)


def _repeated(part: str, pattern: str, count: int) -> list[str]:
    """Expand ``local*5``, to at most `count`."""
    match = re.fullmatch(r"\s*([a-z]+)\s*(?:\*\s*(\d{1,9})\s*)?", part)
    if match is None:
        raise WeftError(f"cannot read {part.strip()!r} of pattern {pattern!r}: it takes local or global, with *number")
    return [match[1]] * min(int(match[2] or 1), count)


def _range(part: str, layers: str) -> range:
    """Parse a layer range such as ``3`` or ``0-5``."""
    match = re.fullmatch(r"(-?\d{1,9})(?:\s*-\s*(\d{1,9}))?", part)
    if match is None:
        raise WeftError(
            f'cannot read {part!r} of layers={layers!r}: it takes all, even, odd, "0-5, 8" or "local*5 + global"'
        )
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        raise WeftError(f"layers={layers!r} ends at {last} before it begins at {first}")
    return range(first, last + 1)


def _to_itself(node: Node) -> bool:
    q, k = node.operand("q"), node.operand("k")
    return q is not None and k is not None and q.shape[1] == k.shape[1]

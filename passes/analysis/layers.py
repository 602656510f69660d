"""Layers: the stacks of a graph, recognized by scopes such as ``layers.3``, and the argument `layers` of passes.

A layer is a sequence of nodes that reads the residual stream as one value and returns one value. A stack is a sequence
of layers. Passes remove and copy layers, and renumber the layers that follow.

The argument `layers` selects self-attentions by their position in the graph, an encoder's before its decoder's. It is

- ``all``, ``even`` (0, 2, 4 …) or ``odd``,
- an integer (-1 is the last layer), a list of integers, or a string such as ``"0-5, 8"``,
- a pattern that repeats: ``"local*5 + global"``, also written ``"5:1"``, selects the first five of every six.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Value, WeftError, ops
from weft.ir.op import Trait

from .states import has_cache

LAYER = re.compile(r"((?:.*?\.)?layers)\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Layer:
    """Layer `number` of the stack whose scopes begin with `stack`; `nodes` compute the value `y` from `x`."""

    stack: str
    number: int
    nodes: tuple[Node, ...]
    x: Value
    y: Value


def find_stack(graph: Graph, name: str, rule: str) -> list[Layer]:
    """Return the layers of the stack `name` ("": the only stack), in order.

    Raises:
        WeftError: naming the pass `rule`, if the stack is missing or ambiguous, the graph has caches, a layer does not
            return exactly one value, or the first layer does not read exactly one value of the type that it returns.
    """
    refuse_caches(graph, rule)
    stacks: dict[str, dict[int, list[Node]]] = {}
    for node in graph.nodes:
        if match := LAYER.match(node.scope):
            stacks.setdefault(match[1], {}).setdefault(int(match[2]), []).append(node)
    if not stacks:
        raise WeftError(f"{rule}: graph {graph.name} has no layers, which are scopes named layers.0, layers.1, …")
    if (not name and len(stacks) > 1) or (name and name not in stacks):
        raise WeftError(f"{rule}: stack={name or ''} must be one of {', '.join(stacks)}")
    stack = name or next(iter(stacks))
    layers: list[Layer] = []
    for number, nodes in sorted(stacks[stack].items()):
        y = _find_output(nodes, f"{rule}: {stack}.{number}")
        x = layers[-1].y if layers else _find_input(nodes, y, f"{rule}: {stack}.{number}")
        layers.append(Layer(stack, number, tuple(nodes), x, y))
    return layers


def _find_output(nodes: Iterable[Node], where: str) -> Value:
    inside = set(nodes)
    outputs = [v for n in inside for v in n.outputs if v.is_output or any(u not in inside for u in v.users)]
    if len(outputs) != 1:
        names = ", ".join(f"%{v.name}" for v in outputs) or "nothing"
        raise WeftError(f"{where} returns {names}, but a layer must return one value")
    return outputs[0]


def _find_input(nodes: Iterable[Node], y: Value, where: str) -> Value:
    inside = set(nodes)
    read = {v: None for n in nodes for v in n.inputs if v is not None and not isinstance(v, Param)}
    sources = [v for v in read if v.producer not in inside and v.type == y.type]
    if len(sources) != 1:
        names = ", ".join(f"%{v.name}" for v in sources) or "none"
        raise WeftError(f"{where} must read one value of the type of its output %{y.name}, but reads {names}")
    return sources[0]


def renumber_layers(graph: Graph, stack: str, number: Mapping[int, int]) -> None:
    """Renumber layer i of `stack` to `number[i]`, in place: in scopes and in names of values and parameters.

    Layers that are not keys of `number` keep their number.
    """
    layer = re.compile(rf"{re.escape(stack)}\.(\d+)(?=\.|$)")

    def rename(text: str) -> str:
        match = layer.match(text)
        return f"{stack}.{number.get(int(match[1]), match[1])}{text[match.end() :]}" if match else text

    used: set[str] = set()
    for node in graph.nodes:
        node.scope = rename(node.scope)
    for value in [*graph.params.values(), *(v for n in graph.nodes for v in n.outputs)]:
        new = rename(value.name)
        if new in used:  # by a parameter of several layers, one of which was dropped
            new = graph.reserve_name(new)
        elif new != value.name:
            graph.reserve_name(new)  # reserve it: no later value gets it
        used.add(new)
        value.name = new
    # The keys are names, which have changed; the order stays.
    graph.params = {p.name: p for p in graph.params.values()}


def expand_add_norms(graph: Graph) -> bool:
    """Expand every add_norm in place; return whether there was one. Each add is moved to the layer that it ends."""
    fused = [n for n in graph.nodes if n.op is ops.add_norm]
    for node in fused:
        with graph.inserting(before=node):
            normed, total = node.op.expand(node)
        graph.replace(node, normed, total)
        scopes = [v.producer.scope for v in node.inputs[:2] if v is not None and v.producer is not None]
        layers = {int(match[2]): f"{match[1]}.{match[2]}" for scope in scopes if (match := LAYER.match(scope))}
        assert total.producer is not None
        # The addition belongs to the later of the layers that compute its operands: it ends that layer.
        total.producer.scope = layers[max(layers)] if layers else scopes[-1] if scopes else ""
    return bool(fused)


Layers = str | int | tuple[int, ...]
ROLES = ("local", "global")


def find_self_attentions(graph: Graph, name: str) -> list[Node]:
    """Return the softmax attentions of `graph` whose queries and keys are equal in number, in graph order.

    Raises:
        WeftError: naming the pass `name`, if there are none, or if `graph` has caches.
    """
    refuse_caches(graph, name)
    softmax = (n for n in graph.nodes if Trait.ATTENTION in n.op.traits)
    attentions = [n for n in softmax if n.required_operand("q").shape[1] == n.required_operand("k").shape[1]]
    if not attentions:
        raise WeftError(f"{name}: graph {graph.name} has no softmax self-attention")
    return attentions


def refuse_caches(graph: Graph, name: str) -> None:
    """Raise a WeftError that names the pass `name` if `graph` has caches or states."""
    if has_cache(graph):
        raise WeftError(f"{name}: graph {graph.name} has caches already; run {name} before kv-cache")


def select_attentions(graph: Graph, layers: Layers, name: str) -> list[Node]:
    """Return the self-attentions of `graph` that `layers` selects (see `parse_layers`), in the order of the graph.

    Raises:
        WeftError: naming the pass `name`, as `find_self_attentions` and `parse_layers`.
    """
    attentions = find_self_attentions(graph, name)
    try:
        return [attentions[i] for i in parse_layers(layers, len(attentions))]
    except WeftError as e:
        raise WeftError(f"{name}: {e}") from None


def parse_layers(layers: Layers, count: int) -> list[int]:
    """Return the indices, ascending from 0, of the layers out of `count` that `layers` selects.

    `layers` is an index or a tuple of indices (negative ones count from the end), "all", "even", "odd", a list such as
    "0-5, 8" (5 included), or a pattern such as "local*5 + global" (see `expand_pattern`), which selects local layers.

    Raises:
        WeftError: if `layers` cannot be parsed, names a layer that does not exist, or selects none.
    """
    wanted = list[int]()
    for i in _read_layers(layers, count):
        if not -count <= i < count:
            raise WeftError(f"there is no layer {i}; the graph has layers 0 to {count - 1}")
        wanted.append(i)
    if not wanted:
        raise WeftError(f"layers={layers!r} selects none of the layers 0 to {count - 1}")
    return sorted({i % count for i in wanted})


def _read_layers(layers: Layers, count: int) -> Iterable[int]:
    """Return the layer numbers that `layers` selects, not yet checked: they may be negative or out of range.
    Ranges stay lazy: the caller stops at the first invalid number of a huge range."""
    if not isinstance(layers, str):
        return [layers] if isinstance(layers, int) else layers
    text = layers.strip()
    if text in ("all", "even", "odd"):
        return range(text == "odd", count, 1 if text == "all" else 2)
    if any(role in text for role in ROLES) or ":" in text:
        return [i for i, role in enumerate(expand_pattern(text, count)) if role == "local"]
    return itertools.chain.from_iterable(_parse_range(part.strip(), layers) for part in text.split(","))


def expand_pattern(pattern: str | Sequence[str], count: int) -> list[str]:
    """Return the role ``local`` or ``global`` of each of `count` layers, by repeating `pattern`.

    `pattern` is a list of roles, or a string: "5:1" (5 local, 1 global) or "local*5 + global".

    Raises:
        WeftError: if `pattern` cannot be parsed.
    """
    if isinstance(pattern, str):
        terms = re.sub(r"\A\s*(\d{1,9})\s*:\s*(\d{1,9})\s*\Z", r"local*\1 + global*\2", pattern)
        period = [role for term in terms.split("+") for role in _expand_role(term, pattern, count)]
    else:
        period = list(pattern)
    if not period or not set(period) <= set(ROLES):
        raise WeftError(f'pattern {pattern!r} is unknown: give "5:1", "local*5 + global" or a list of local and global')
    return list(itertools.islice(itertools.cycle(period), count))


def _expand_role(term: str, pattern: str, count: int) -> list[str]:
    """Expand a `term` of `pattern`, such as "local*5", to a list of 5 roles, or of `count` roles if that is less."""
    match = re.fullmatch(r"\s*([a-z]+)\s*(?:\*\s*(\d{1,9})\s*)?", term)
    if match is None:
        raise WeftError(f"cannot read {term.strip()!r} in pattern {pattern!r}: a term is local or global, or local*5")
    return [match[1]] * min(int(match[2] or 1), count)


def _parse_range(part: str, layers: str) -> range:
    """Parse "3" or "0-5" (both ends inclusive), one item of the string `layers`, into a range."""
    match = re.fullmatch(r"(-?\d{1,9})(?:\s*-\s*(\d{1,9}))?", part)
    if match is None:
        raise WeftError(
            f'cannot read {part!r} in layers={layers!r}: give all, even, odd, "0-5, 8" or "local*5 + global"'
        )
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        raise WeftError(f"layers={layers!r} ends at {last} before it begins at {first}")
    return range(first, last + 1)

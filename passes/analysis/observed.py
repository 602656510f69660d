"""Layers of all stacks of a graph, their outputs, and names for values inside them.

A value inside a graph is named by its kind and its place: ``attention.layers.3.attn``, ``residual.layers.3``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Value, WeftError, ops
from weft.ir.op import Trait

from ..edits.edit import backward_slice
from .feed_forward import match_feed_forward
from .layers import LAYER, Layers, parse_layers
from .residual import find_streams


@dataclass(frozen=True)
class LayerNodes:
    """Layer `name` ("layers.3"), all of its `nodes`, and its `output`: the value that the next layer reads."""

    name: str
    nodes: tuple[Node, ...]
    output: Value

    @property
    def stack(self) -> str:
        return self.name.rpartition(".")[0]

    def find_input(self) -> Value | None:
        """Return the first value of the type of the output that the layer reads from outside; None if there is none."""
        inside = set(self.nodes)
        read = (v for node in self.nodes for v in node.inputs if v is not None and not isinstance(v, Param))
        return next((v for v in read if v.producer not in inside and v.type == self.output.type), None)


def list_layers(graph: Graph) -> list[LayerNodes]:
    """Return the layers of all stacks, in graph order: an encoder's before its decoder's.

    A layer may return several values, such as keys that later layers share: its output is the last one of a type that
    all layers of the stack return.
    """
    stacks: dict[str, dict[str, list[Node]]] = {}
    for node in graph.nodes:
        if match := LAYER.match(node.scope):
            stacks.setdefault(match[1], {}).setdefault(f"{match[1]}.{match[2]}", []).append(node)
    layers: list[LayerNodes] = []
    for members in stacks.values():
        returned = {name: _list_returned(nodes) for name, nodes in members.items()}
        common = set.intersection(*({v.type for v in values} for values in returned.values()))
        for name, values in returned.items():
            if fitting := [v for v in values if v.type in common] or values:
                layers.append(LayerNodes(name, tuple(members[name]), fitting[-1]))
    return layers


def _list_returned(nodes: Iterable[Node]) -> list[Value]:
    """Return the float values of at least two axes that `nodes` compute and that other nodes, or the caller, read."""
    inside = dict.fromkeys(nodes)
    values = (v for n in inside for v in n.outputs if v.type.dtype.is_float and len(v.shape) > 1)
    return [v for v in values if v.is_output or any(user not in inside for user in v.users)]


def select_layers(graph: Graph, layers: Layers, rule: str) -> list[LayerNodes]:
    """Return the layers of `graph` that `layers` selects by their number among all layers (see `parse_layers`).

    Raises:
        WeftError: naming the pass `rule`, if the graph has no layers, or as `parse_layers`.
    """
    members = list_layers(graph)
    if not members:
        raise WeftError(f"{rule}: graph {graph.name} has no layers, which are scopes named layers.0, layers.1, …")
    try:
        return [members[i] for i in parse_layers(layers, len(members))]
    except WeftError as e:
        raise WeftError(f"{rule}: {e}") from None


def parse_kinds(what: str, kinds: Iterable[str], rule: str) -> list[str]:
    """Return the names in a list such as "attention, residual", among them "all".

    Raises:
        WeftError: naming the pass `rule`, if a name is neither "all" nor one of `kinds`.
    """
    names = [name for part in what.split(",") if (name := part.strip())]
    if unknown := [name for name in names if name not in (*kinds, "all")]:
        raise WeftError(f"{rule}: what={unknown[0]} is unknown: it may list {', '.join(kinds)}, or be all")
    return names


def name_values(kind: str, values: Mapping[Node, Value]) -> dict[str, Value]:
    """Return `values` by name: `kind` and the scope of the node, with the name of its output if it shares its scope."""
    shared = Counter(node.scope for node in values)
    named = {}
    for node, value in values.items():
        local = node.output.name.removeprefix(f"{node.scope}.") if node.scope else node.output.name
        place = node.scope if node.scope and shared[node.scope] == 1 else f"{node.scope}.{local}".strip(".")
        named[f"{kind}.{place}"] = value
    return named


def find_hidden_units(node: Node) -> Value | None:
    """Return the hidden units [..., hidden] of the feed-forward whose last node is `node`; None for other nodes."""
    feed_forward = match_feed_forward(node)
    return None if feed_forward is None or isinstance(feed_forward, str) else node.inputs[0]


def has_heads(node: Node) -> bool:
    """Return whether `node` mixes tokens by heads: its output is [batch, seq, heads · width]."""
    return "heads" in node.attrs and bool(node.op.traits & {Trait.ATTENTION, Trait.RECURRENT})


def find_sublayer(name: str) -> str | None:
    """Return the sublayer of a value or scope: "layers.3.attn" of "layers.3.attn.o"; None outside of layers."""
    match = LAYER.match(name)
    part = name[match.end() :].partition(".")[0] if match else ""
    return f"{match[1]}.{match[2]}.{part}" if match and part else None


@dataclass(frozen=True)
class PartSite:
    """A `value` [.., features] of a part: `count` elements, such as heads, share its features. A part may have several
    values, with different `name`s."""

    part: str
    name: str
    value: Value
    count: int


def find_sites(kind: str, graph: Graph, layers: Iterable[LayerNodes]) -> list[PartSite]:
    """Return the parts of `kind` (heads, neurons, experts or sublayers) in `layers`, named ``heads.layers.3.attn``."""
    nodes = [node for layer in layers for node in layer.nodes]
    if kind == "heads":
        named = name_values(kind, {node: node.output for node in nodes if has_heads(node)})
        return [PartSite(n, n, v, v.producer.attrs["heads"]) for n, v in named.items() if v.producer is not None]
    if kind == "sublayers":
        names, written = {layer.name for layer in layers}, dict[str, list[Value]]()
        for value in (value for stream in find_streams(graph) for value in stream.writers.values()):
            sublayer = None if value.producer is None else find_sublayer(value.name)
            if sublayer is not None and sublayer.rpartition(".")[0] in names:
                written.setdefault(f"{kind}.{sublayer}", []).append(value)
        return [
            PartSite(part, part if len(values) == 1 else f"{part}.{value.name.rpartition('.')[2]}", value, 1)
            for part, values in written.items()
            for value in values
        ]
    of = find_hidden_units if kind == "neurons" else _find_routes
    named = name_values(kind, {node: units for node in nodes if (units := of(node)) is not None})
    return [PartSite(name, name, v, v.width) for name, v in named.items()]


def _find_routes(node: Node) -> Value | None:
    return node.operand("combine") if node.op is ops.moe else None


def find_head(graph: Graph, layers: Iterable[LayerNodes]) -> tuple[str, list[Node]] | None:
    """Return the stack whose last output decides the logits of `graph`, and the nodes between them, in graph order.

    Return None if there are no logits, or they also depend on other layers.
    """
    logits, outputs = graph.outputs.get("logits"), {layer.stack: layer.output for layer in layers}  # the last of each
    if logits is None:
        return None
    for stack, last in outputs.items():
        between = set(backward_slice([logits], [last]))
        reached = {v for node in between for v in node.inputs if v is not None and not isinstance(v, Param)}
        if last in reached and not any(LAYER.match(node.scope) for node in between):
            return stack, [node for node in graph.nodes if node in between]
    return None

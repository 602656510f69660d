"""The sizes that distinguish architectures: widths, heads, experts, and position encodings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.op import Trait
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.types import sizes
from weft.passes.analysis.costs import find_learned_params

ACTIVATIONS = (ops.glu, ops.gelu, ops.relu, ops.relu2, ops.swish, ops.elu, ops.tanh, ops.sigmoid)
BETWEEN = (*ACTIVATIONS, ops.square, ops.mul, ops.split)  # ops between the two linear layers of a feed-forward
LINEAR = (ops.linear, ops.norm_linear)


@dataclass(frozen=True)
class Experts:
    """The experts of a layer: their count, their inner width, and the number per token (None if it is not fixed)."""

    count: int
    hidden: int
    active: int | None


@dataclass(frozen=True)
class Dimensions:
    """Distinct sizes of each kind, in the order of the layers that have them.

    width: of the residual stream. heads: of queries. kv_heads, head_dim: without latent attention. latent: its cached
    values per token. hidden, shared: inner width of feed-forwards, of shared experts. recurrences: names of ops.
    """

    width: tuple[int, ...]
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: tuple[int, ...]
    latent: tuple[int, ...]
    windows: tuple[int, ...]
    recurrences: tuple[str, ...]
    hidden: tuple[int, ...]
    shared: tuple[int, ...]
    experts: tuple[Experts, ...]
    positions: tuple[str, ...]


def find_dimensions(graph: Graph) -> Dimensions:
    """Return the dimensions of `graph`, inferred from its operations."""
    nodes = list(graph.nodes)
    attentions = [node for node in nodes if Trait.ATTENTION in node.op.traits]
    latent = [node for node in attentions if node.attrs.get("value_dim")]
    with_heads = [node for node in attentions if node not in latent]
    mixtures = [node for node in nodes if node.op is ops.moe]
    expert_scopes = {node.scope for node in mixtures}
    maps = [(node, width) for node in nodes if node.op in LINEAR and (width := _find_inner_width(node))]
    sizes_by_field: dict[str, Iterable[Any]] = {
        "width": _list_layer_widths(nodes),
        "heads": (node.attrs["heads"] for node in attentions),
        "kv_heads": (node.attrs["kv_heads" if "kv_heads" in node.attrs else "heads"] for node in with_heads),
        "head_dim": (x.width // node.attrs["heads"] for node in with_heads if (x := node.inputs[0]) is not None),
        "latent": (k.width for node in latent if (k := node.operand("k")) is not None),
        "windows": (w for node in attentions if (w := node.attrs.get("window")) is not None),
        "recurrences": (node.op.name for node in nodes if Trait.RECURRENT in node.op.traits),
        "hidden": (width for node, width in maps if node.scope.rpartition(".")[0] not in expert_scopes),
        "shared": (width for node, width in maps if node.scope.rpartition(".")[0] in expert_scopes),
        "experts": map(_read_experts, mixtures),
        "positions": _list_positions(graph),
    }
    return Dimensions(**{name: tuple(dict.fromkeys(values)) for name, values in sizes_by_field.items()})


def _list_layer_widths(nodes: Iterable[Node]) -> Iterator[int]:
    last: dict[str, Value] = {}
    for node in nodes:
        words = node.scope.split(".")
        numbers = [i for i, word in enumerate(words) if word.isdigit()]
        if numbers:
            last[".".join(words[: numbers[0] + 1])] = node.output
    shapes = (value.type.shape for value in last.values())
    return (shape[-1] for shape in shapes if shape and isinstance(shape[-1], int))


def _find_inner_width(node: Node) -> int | None:
    """Return the inner width of the feed-forward whose last linear layer is `node`; None if it is not such a layer."""
    x = node.inputs[0]
    assert x is not None
    producers = [value.producer for value in _trace_back(x)]
    ends = [producer for producer in producers if producer is None or producer.op not in BETWEEN]
    reads_linear = all(end is not None and end.op in LINEAR and end.scope == node.scope for end in ends)
    has_activation = any(producer is not None and producer.op in ACTIVATIONS for producer in producers)
    return x.width if reads_linear and has_activation else None


def _trace_back(value: Value) -> Iterator[Value]:
    """Yield `value` and, while its producer is an op of `BETWEEN`, recursively the operands except parameters."""
    yield value
    if value.producer is not None and value.producer.op in BETWEEN:
        for x in value.producer.inputs:
            if x is not None and not isinstance(x, Param):
                yield from _trace_back(x)


def _read_experts(node: Node) -> Experts:
    down = node.operand("down")
    assert down is not None
    count, _, hidden = (sizes.evaluate(size, {}) for size in down.shape)
    return Experts(count, hidden, node.attrs["active"])


def _list_positions(graph: Graph) -> Iterator[str]:
    """Yield the name of each position encoding as in its paper; names may repeat."""
    trained = set(find_learned_params(graph))
    for node in graph.nodes:
        if node.op is ops.embedding:
            table = next((v for v in node.inputs if isinstance(v, Param)), None)
            if table is not None and table.shape[0] == graph.meta.get("max_positions"):
                yield "learned" if table in trained else "sinusoidal"
        elif node.op is ops.alibi:
            yield "ALiBi"
        elif node.op in (ops.relative_position_bias, ops.relative_attention):
            yield "relative"
    for param in graph.params.values():
        if isinstance(rope := param.recipe, RopeFrequencies):
            scaled = f", {rope.scaling} × {rope.factor:g}" if rope.scaling != "none" else ""
            yield f"RoPE, base {rope.theta:,.0f}{scaled}"

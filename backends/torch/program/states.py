"""Nodes of a decoder with caches or states, and nodes that count the keys of such attentions."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.passes.analysis.states import EMBEDDED, SOURCE, caches, has_cache, states, tokens_of
from weft.passes.library.cache.key_axis import bias_makers


def cached_nodes(graph: Graph) -> set[Node]:
    """The causal self-attentions and the recurrences of a model that generates; none where the graph has caches itself
    or no tokens to count."""
    if graph.meta.get("kind") not in ("decoder", "encoder-decoder") or has_cache(graph):
        return set()
    if tokens_of(graph) is None:
        return set()
    return {n for n in graph.nodes if caches(n) or states(n)}


def counts_keys(graph: Graph, cached: set[Node]) -> set[Node]:
    """The nodes that make biases of the attentions in `cached`: what they count along the call are keys."""
    biases = [b for n in cached if n.op is ops.attention and (b := n.operand("bias")) is not None]
    return set(bias_makers(graph, biases)) if biases else set()


def cross_attentions(graph: Graph, cached: set[Node]) -> set[Node]:
    """The attentions of a decoder with caches to what an encoder made of inputs that the decoder does not read."""
    if not cached:
        return set()
    ours = _reached(graph, {v for name, v in graph.inputs.items() if name in ("input_ids", EMBEDDED, "position_ids")})

    def crosses(node: Node) -> bool:
        if node.op is not ops.attention:
            return False
        q, k, v = node.inputs[:3]
        return v is not None and q in ours and not ours.intersection((k, v))

    return {n for n in graph.nodes if n not in cached and crosses(n)}


def encoder_inputs(graph: Graph, crosses: set[Node]) -> list[Value]:
    """The inputs of `graph` that only its encoder and the attentions to it read."""
    if not crosses:
        return []
    return [v for name, v in graph.inputs.items() if name in SOURCE]


def _reached(graph: Graph, values: set[Value]) -> set[Value]:
    """`values` and all that is made of them."""
    found = set(values)
    for node in graph.nodes:
        if found.intersection(v for v in node.inputs if v is not None and not isinstance(v, Param)):
            found.update(node.outputs)
    return found

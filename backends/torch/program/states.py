"""Nodes of a decoder with caches or states, and nodes that count the keys of such attentions."""

from __future__ import annotations

from weft.ir import WeftError, ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.passes.analysis.states import EMBEDDED, SOURCE, caches, has_cache, states, tokens_of
from weft.passes.analysis.tokens.scores import bias_makers


def cached_nodes(graph: Graph) -> set[Node]:
    """The causal self-attentions and the recurrences of a model that generates; none where the graph has caches itself,
    no tokens to count, or nodes that run on chosen tokens."""
    if not _generates(graph) or choosing(graph) is not None:
        return set()
    return {n for n in graph.nodes if caches(n) or states(n)}


def _generates(graph: Graph) -> bool:
    kind = graph.meta.get("kind") in ("decoder", "encoder-decoder")
    return kind and not has_cache(graph) and tokens_of(graph) is not None


def choosing(graph: Graph) -> Node | None:
    """The first node of a decoder that would have a cache or a state, but runs on tokens chosen among all of a text."""
    tokens = tokens_of(graph)
    if tokens is None or not _generates(graph):
        return None
    nodes = (n for n in graph.nodes if caches(n) or states(n))
    return next((n for n in nodes if n.inputs[0] is not None and n.inputs[0].shape[1] != tokens.shape[1]), None)


def check_writes(graph: Graph) -> None:
    """Refuse a decoder that cannot go on from call to call.

    Raises:
        WeftError: naming the node that runs on tokens chosen among all of a text.
    """
    node = choosing(graph)
    if node is not None:
        raise WeftError(
            f"{graph.name} cannot write: {node.op.name} (%{node.output.name}) runs on tokens that are chosen among all "
            "of a text, later ones too; `weft.torch` gives the module, to train it"
        )


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

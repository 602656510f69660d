"""Find the attentions and recurrences of a decoder that need a cache or state, and nodes that depend on their keys."""

from __future__ import annotations

from weft.ir import WeftError, ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.passes.analysis.states import EMBEDDED, SOURCE, find_caches, find_states, find_tokens, has_cache
from weft.passes.analysis.tokens.scores import find_bias_nodes


def find_cached_nodes(graph: Graph) -> set[Node]:
    """Return the causal self-attentions and recurrences of a decoder that can generate with a cache.

    The set is empty if the graph has cache operands itself, reads no tokens, is not a decoder or encoder-decoder, or
    has such a node that runs on tokens chosen from the whole sequence.
    """
    if not _can_generate(graph) or find_subset_node(graph) is not None:
        return set()
    return {n for n in graph.nodes if find_caches(n) or find_states(n)}


def _can_generate(graph: Graph) -> bool:
    kind = graph.meta.get("kind") in ("decoder", "encoder-decoder")
    return kind and not has_cache(graph) and find_tokens(graph) is not None


def find_subset_node(graph: Graph) -> Node | None:
    """Return the first node that needs a cache or state but runs on a subset of the tokens, chosen from the sequence.

    None if there is no such node, or if the graph is not a decoder without cache operands.
    """
    tokens = find_tokens(graph)
    if tokens is None or not _can_generate(graph):
        return None
    nodes = (n for n in graph.nodes if find_caches(n) or find_states(n))
    return next((n for n in nodes if n.inputs[0] is not None and n.inputs[0].shape[1] != tokens.shape[1]), None)


def check_cache_writes(graph: Graph) -> None:
    """Check that no node with a cache or state runs on tokens that are chosen from the whole sequence.

    Raises:
        WeftError: naming the first such node.
    """
    node = find_subset_node(graph)
    if node is not None:
        raise WeftError(
            f"{graph.name} cannot write: {node.op.name} (%{node.output.name}) runs on tokens that are chosen among all "
            "of a sequence, also later ones; `weft.torch` gives the module, to train it"
        )


def find_key_bias_nodes(graph: Graph, cached: set[Node]) -> set[Node]:
    """Return the nodes that compute the attention biases of `cached`: their iotas run over keys, not over tokens."""
    biases = [b for n in cached if n.op is ops.attention and (b := n.operand("bias")) is not None]
    return set(find_bias_nodes(graph, biases)) if biases else set()


def find_cross_attentions(graph: Graph, cached: set[Node]) -> set[Node]:
    """Return the cross-attentions of a decoder: only their queries depend on the decoder's inputs.

    The set is empty if `cached` is.
    """
    if not cached:
        return set()
    decoder_values = _find_dependents(
        graph, {v for name, v in graph.inputs.items() if name in ("input_ids", EMBEDDED, "position_ids")}
    )

    def crosses(node: Node) -> bool:
        if node.op is not ops.attention:
            return False
        q, k, v = node.inputs[:3]
        return v is not None and q in decoder_values and not decoder_values.intersection((k, v))

    return {n for n in graph.nodes if n not in cached and crosses(n)}


def find_encoder_inputs(graph: Graph, crosses: set[Node]) -> list[Value]:
    """Return the inputs that only the encoder reads; an empty list without cross-attentions (`crosses`)."""
    if not crosses:
        return []
    return [v for name, v in graph.inputs.items() if name in SOURCE]


def _find_dependents(graph: Graph, values: set[Value]) -> set[Value]:
    """Return `values` and all values that depend on them."""
    dependent = set(values)
    for node in graph.nodes:
        if dependent.intersection(v for v in node.inputs if v is not None and not isinstance(v, Param)):
            dependent.update(node.outputs)
    return dependent

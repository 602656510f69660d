"""Find the attentions and recurrences of a decoder that need a cache or state, and the nodes around them."""

from __future__ import annotations

from weft.ir import WeftError, ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.passes.analysis.states import EMBEDDED, find_caches, find_states, find_tokens, has_cache
from weft.passes.analysis.tokens.scores import find_bias_nodes


def find_cached_nodes(graph: Graph) -> set[Node]:
    """Return the causal self-attentions, lightning indexes and recurrences of a decoder that can generate with a cache.
    The set is empty if the graph has cache operands, reads no tokens, is neither a decoder nor an encoder-decoder, or
    if one of these nodes runs on a subset of the tokens (`find_subset_node`)."""
    return set() if find_subset_node(graph) is not None else set(_list_stateful_nodes(graph))


def _list_stateful_nodes(graph: Graph) -> list[Node]:
    """Return the nodes that need a cache or state to generate; [] if `graph` cannot generate, or has cache operands."""
    generates = graph.meta.get("kind") in ("decoder", "encoder-decoder") and find_tokens(graph) is not None
    return [n for n in graph.nodes if find_caches(n) or find_states(n)] if generates and not has_cache(graph) else []


def find_subset_node(graph: Graph) -> Node | None:
    """Return the first node that needs a cache or state but runs on a subset of the tokens, chosen from the sequence.
    Return None if there is no such node, or if the graph cannot generate with a cache for another reason."""
    seq = None if (tokens := find_tokens(graph)) is None else tokens.shape[1]
    nodes = ((n, n.inputs[0]) for n in _list_stateful_nodes(graph))
    return next((node for node, x in nodes if x is not None and x.shape[1] != seq), None)


def check_cache_writes(graph: Graph) -> None:
    """Check that every node with a cache or state runs on all tokens of the sequence.

    Raises:
        WeftError: naming the first node that runs on a subset of them.
    """
    node = find_subset_node(graph)
    if node is not None:
        raise WeftError(
            f"{graph.name} cannot generate: {node.op.name} (%{node.output.name}) runs on tokens chosen from the whole "
            "sequence, including later ones; use `weft.torch`, to train only"
        )


def find_key_bias_nodes(graph: Graph, cached: set[Node]) -> set[Node]:
    """Return the nodes that compute biases of the attentions in `cached`; their iotas count keys, not new tokens."""
    biases = [b for n in cached if n.op is ops.attention and (b := n.operand("bias")) is not None]
    return set(find_bias_nodes(graph, biases)) if biases else set()


def find_cross_attentions(graph: Graph, cached: set[Node]) -> set[Node]:
    """Return the cross-attentions of a decoder: only their queries depend on the decoder's inputs. `cached` are its
    nodes with a cache; if there are none, the result is empty."""
    if not cached:
        return set()
    inputs = {v for name, v in graph.inputs.items() if name in ("input_ids", EMBEDDED, "position_ids")}
    decoder_values = _find_dependents(graph, inputs)

    def crosses(node: Node) -> bool:
        if node.op is not ops.attention:
            return False
        q, k, v = node.inputs[:3]
        return v is not None and q in decoder_values and not decoder_values.intersection((k, v))

    return {n for n in graph.nodes if n not in cached and crosses(n)}


def _find_dependents(graph: Graph, values: set[Value]) -> set[Value]:
    """Return `values` and all values that depend on them."""
    dependent = set(values)
    for node in graph.nodes:
        if dependent.intersection(v for v in node.inputs if v is not None and not isinstance(v, Param)):
            dependent.update(node.outputs)
    return dependent

"""Which nodes of a decoder keep something from call to call, and which count the keys that such attentions see."""

from __future__ import annotations

from weft.ir.graph import Graph, Node
from weft.ir.ops.fused_attention import SOFTMAX
from weft.passes.key_axis import bias_makers
from weft.passes.memory import remembers
from weft.passes.recurrences import states

ATTENTIONS = {*(op.name for op in SOFTMAX), "relative_attention"}


def cached_nodes(graph: Graph) -> set[Node]:
    """The causal self-attentions and the recurrences of a model that generates; none where the graph has caches itself
    or a bidirectional attention lets a token see later ones."""
    if graph.meta.get("kind") not in ("decoder", "encoder-decoder") or remembers(graph):
        return set()
    return {n for n in graph.nodes if (n.op.name in ATTENTIONS and n.attrs["causal"]) or states(n)}


def counts_keys(graph: Graph, cached: set[Node]) -> set[Node]:
    """The nodes that make biases of the attentions in `cached`: what they count along the call are keys."""
    biases = [b for n in cached if n.op in SOFTMAX and (b := n.operand("bias")) is not None]
    return set(bias_makers(graph, biases)) if biases else set()

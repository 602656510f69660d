"""Attention scores: the nodes that compute their biases, and the scores that decode kernels support."""

from __future__ import annotations

from collections.abc import Iterable

from weft.ir import Graph, Node, Param, Value, WeftError, ops

from ...edits.edit import backward_slice
from ..states import find_caches

SPARSE_PATTERNS = ("chunked", "dilated")  # patterns of keys that kernels support besides the dense one


def find_bias_nodes(graph: Graph, biases: Iterable[Value]) -> list[Node]:
    """Return the nodes that compute `biases`, in graph order, back to iotas (included) and ops with caches (excluded).

    Raises:
        WeftError: if a node that is not among them reads one of these iotas.
    """
    counts = {n.output: n for n in graph.nodes if n.op is ops.iota}
    makers = set(backward_slice(biases, [*counts, *(n.output for n in graph.nodes if find_caches(n))]))
    makers |= {node for v, node in counts.items() if makers.intersection(v.users)}
    for v, node in counts.items():
        if node in makers and not makers.issuperset(v.users):
            raise WeftError(f"kv-cache: the iota %{v.name} is read by a bias and by other nodes; use one iota for each")
    return [n for n in graph.nodes if n in makers]


def explain_unsupported_scores(bias: Value | None, pattern: str, keep_first: int, latent: bool) -> str | None:
    """Return a reason (str) why no kernel computes the scores of a causal attention without a mask; None if one does.

    Kernels support the pattern dense, and `SPARSE_PATTERNS` if `keep_first` is 0 and the attention is not `latent`. The
    only bias is ALiBi, with slopes that are a parameter and one graph input as the positions of queries and keys.
    """
    if pattern != "dense" and (pattern not in SPARSE_PATTERNS or keep_first or latent):
        return f"its pattern is {pattern}"
    maker = None if bias is None else bias.producer
    if bias is None:
        return None
    if maker is None or maker.op is not ops.alibi:
        chooses = maker is not None and maker.op is ops.lightning_index
        return "its queries choose keys" if chooses else "it has a bias that is not ALiBi's"
    slopes, queries, keys = maker.inputs
    counted = isinstance(slopes, Param) and queries is keys and queries is not None and queries.producer is None
    return None if counted else "its ALiBi does not count positions"

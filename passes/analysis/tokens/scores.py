"""Scores of attention: the nodes that make its biases, and which of them kernels compute themselves."""

from __future__ import annotations

from collections.abc import Iterable

from weft.ir import Graph, Node, Param, Value, WeftError, ops

from ...edits.edit import backward_slice
from ..states import caches

SKIPPING = ("chunked", "dilated")  # patterns of keys that kernels know besides the dense one


def bias_makers(graph: Graph, biases: Iterable[Value]) -> list[Node]:
    """The nodes, in order, that compute `biases`, down to the iotas that count keys, which lend only a length, and to
    what has a cache of its own."""
    counts = {n.output: n for n in graph.nodes if n.op is ops.iota}
    makers = set(backward_slice(biases, [*counts, *(n.output for n in graph.nodes if caches(n))]))
    makers |= {node for v, node in counts.items() if makers.intersection(v.users)}
    for v, node in counts.items():
        if node in makers and not makers.issuperset(v.users):
            raise WeftError(f"kv-cache: %{v.name} counts keys for a bias and something else; count twice")
    return [n for n in graph.nodes if n in makers]


def refusal(bias: Value | None, pattern: str, keep_first: int, latent: bool) -> str | None:
    """Say why no kernel computes the scores of a causal attention without a mask; None if one does."""
    if pattern != "dense" and (pattern not in SKIPPING or keep_first or latent):
        return f"its pattern is {pattern}"
    made = None if bias is None else bias.producer
    if bias is None:
        return None
    if made is None or made.op is not ops.alibi:
        chooses = made is not None and made.op is ops.lightning_index
        return "its queries choose keys" if chooses else "it has a bias that is not ALiBi's"
    slopes, queries, keys = made.inputs
    counted = isinstance(slopes, Param) and queries is keys and queries is not None and queries.producer is None
    return None if counted else "its ALiBi does not count positions"

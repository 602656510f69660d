"""ALiBi without a bias: as one more dimension of queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Value, ops

from ...core.base import Pass
from ...core.trace import Trace
from ...edits.edit import changed, drop


@dataclass(frozen=True)
class AlibiAsDimension(Pass):
    """Add ALiBi's slopes to queries and the positions of keys to keys, instead of a bias to all scores.

    The bias m·(j − i) differs from m·j by m·i, the same for all keys of a row, which softmax does not notice; and m·j
    is scale·(m · j/scale), the product of one more number of q and one more of k. So attention needs no bias of
    [heads, seq, keys], and kernels without one will do. In float32 or less, positions in the thousands cost digits of
    the scores.

    Condition: scores are shifted by a number per row without consequence. Refused for |i − j|, which is no product,
    under a soft cap, with sinks (they are not shifted along), where slopes are computed, and where there are caches.

    Source: Press 2022, Train Short, Test Long (arXiv 2108.12409); softmax(s + c) = softmax(s).

    Example alibi-as-dimension::

        graph example {
          input %q: f32[batch, seq, 8]
          input %k: f32[batch, seq, 4]
          input %v: f32[batch, seq, 4]
          input %at: i64[1, seq]
          param %slopes: f32[4] = alibi_slopes(4)
          %bias: f32[1, 4, seq, seq] = alibi(%slopes, %at, %at)
          %y: f32[batch, seq, 8] = attention(%q, %k, %v, %bias, heads=4, kv_heads=2, causal=true)
          output y = %y
        }
    """

    name = "alibi-as-dimension"
    effect = "exact"
    purpose = "Fold into weights"
    tradeoff = "heads are one number longer, also in a cache, instead of a bias for every score"

    def run(self, graph: Graph, trace: Trace) -> None:
        biases: dict[Node, None] = {}
        for node in graph.nodes:
            bias = node.operand("bias") if node.op is ops.attention else None
            maker = None if bias is None else bias.producer
            if maker is None or maker.op is not ops.alibi:
                continue
            if (reason := _refusal(node, maker)) is not None:
                trace.refuse(self.name, node.output.name, reason)
                continue
            trace.fired(self.name, node.output.name)
            _lengthen(node, maker)
            biases[maker] = None
        drop(graph, biases)


def _refusal(node: Node, maker: Node) -> str | None:
    """Say why the bias of `node`, made by `maker`, cannot become a dimension of the heads."""
    if maker.attrs["symmetric"]:
        return "its bias by |i − j| is no product of something of the query and something of the key"
    if node.attrs["cache_bits"] is not None:
        return "its cache has scales of keys as they are; run it before quantize-cache"
    if node.attrs["softcap"] is not None:
        return "its soft cap bends scores before the bias is added"
    if node.operand("sinks") is not None:
        return "its sinks are not shifted with the scores"
    if node.attrs["scale"] == 0:
        return "its scale is 0: nothing that is part of q and k is seen"
    if not isinstance(maker.operand("slopes"), Param):
        return "its slopes are computed"
    if node.operand("past_k") is not None:
        return "it has a cache of its keys; run alibi-as-dimension before kv-cache"
    return None


def _lengthen(node: Node, maker: Node) -> None:
    """Give the heads of `node` the dimension that the bias made by `maker` is."""
    (q, k), (slopes, _, keys) = node.inputs[:2], maker.inputs
    heads, kv_heads, scale = node.attrs["heads"], node.attrs["kv_heads"], node.attrs["scale"]
    assert q is not None and k is not None and slopes is not None and keys is not None
    factor = 1 / math.sqrt(q.width // heads) if scale is None else scale
    with node.graph.inserting(before=node):
        at = ops.affine(ops.cast(keys, to=k.type.dtype), by=1 / factor)
        q = _joined(q, heads, ops.reshape(slopes, shape=(1, 1, heads, 1)))
        k = _joined(k, kv_heads, ops.unsqueeze(at, axes=(2, 3)))
    # The scale is spelled out: its default would follow the longer heads.
    changed(node, {"q": q, "k": k, "bias": None}, scale=factor)


def _joined(x: Value, heads: int, more: Value) -> Value:
    """x [batch, n, heads·d] with a number behind every head's, from `more` [batch or 1, n or 1, heads or 1, 1]."""
    lead = (*x.shape[:2], heads)
    apart = ops.reshape(x, shape=(*lead, x.width // heads))
    longer = ops.concat(apart, ops.expand(more, shape=(*lead, 1)), axis=3)
    return ops.reshape(longer, shape=(*x.shape[:2], x.width + heads))

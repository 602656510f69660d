"""ALiBi without a bias: one more dimension of queries and keys."""

from __future__ import annotations

import math

from weft.ir import Graph, Node, Param, Value, ops

from ... import Pass, Trace
from ...edits.edit import erase_unused, rebuild_node


class AlibiAsDimension(Pass):
    """Append ALiBi's slopes to the queries and the key positions to the keys, instead of adding a bias to all scores.

    The bias m·(j − i) of query i and key j differs from m·j by m·i, which is equal for all keys, so softmax cancels it.
    m·j is scale·(m · j/scale), the product of one extra feature of q and one of k. So attention needs no bias
    [heads, seq, keys], and kernels without a bias operand work. In float32 and narrower dtypes, positions in the
    thousands reduce the precision of the scores.

    Condition: a constant added to all scores of a query has no effect. The pass refuses a bias by |i − j|, which does
    not factorize, computed slopes, and attentions with scale 0, a soft cap, sinks (which are not shifted) or a cache.

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
    tradeoff = "heads are one feature longer, also in a cache, instead of a bias for every score"

    def run(self, graph: Graph, trace: Trace) -> None:
        biases: dict[Node, None] = {}
        for node in graph.nodes:
            bias = node.operand("bias") if node.op is ops.attention else None
            alibi = None if bias is None else bias.producer
            if alibi is None or alibi.op is not ops.alibi:
                continue
            if (reason := _find_obstacle(node, alibi)) is not None:
                trace.refuse(self.name, node.output.name, reason)
                continue
            trace.record_rewrite(self.name, node.output.name)
            _append_alibi(node, alibi)
            biases[alibi] = None
        erase_unused(graph, biases)


def _find_obstacle(node: Node, alibi: Node) -> str | None:
    """Return why the bias that `alibi` adds to the scores of attention `node` cannot be one more feature of its queries
    and keys; None if it can."""
    if alibi.attrs["symmetric"]:
        return "its bias by |i − j| is not a product of a feature of the query and one of the key"
    if node.attrs["cache_bits"] is not None:
        return "its cache has scales for the present keys; run it before quantize-cache"
    if node.attrs["softcap"] is not None:
        return "its soft cap applies to the scores before the bias is added"
    if node.operand("sinks") is not None:
        return "its sinks are not shifted with the scores"
    if node.attrs["scale"] == 0:
        return "its scale is 0: features of q and k have no effect"
    if not isinstance(alibi.operand("slopes"), Param):
        return "its slopes are computed"
    if node.operand("past_k") is not None:
        return "it has a cache of its keys; run alibi-as-dimension before kv-cache"
    return None


def _append_alibi(node: Node, alibi: Node) -> None:
    """Replace the bias of `node` by features: slopes of `alibi` in its queries, key positions / scale in its keys."""
    (q, k), (slopes, _, keys) = node.inputs[:2], alibi.inputs
    heads, kv_heads, scale = node.attrs["heads"], node.attrs["kv_heads"], node.attrs["scale"]
    assert q is not None and k is not None and slopes is not None and keys is not None
    factor = 1 / math.sqrt(q.width // heads) if scale is None else scale
    with node.graph.inserting(before=node):
        at = ops.affine(ops.cast(keys, to=k.type.dtype), by=1 / factor)
        q = _append_feature(q, heads, ops.reshape(slopes, shape=(1, 1, heads, 1)))
        k = _append_feature(k, kv_heads, ops.unsqueeze(at, axes=(2, 3)))
    # The scale is explicit: the default would follow the longer heads.
    rebuild_node(node, {"q": q, "k": k, "bias": None}, scale=factor)


def _append_feature(x: Value, heads: int, feature: Value) -> Value:
    """Return x [batch, n, heads·d] with `feature` [batch or 1, n or 1, heads or 1, 1] appended to every head."""
    lead = (*x.shape[:2], heads)
    by_head = ops.reshape(x, shape=(*lead, x.width // heads))
    longer = ops.concat(by_head, ops.expand(feature, shape=(*lead, 1)), axis=3)
    return ops.reshape(longer, shape=(*x.shape[:2], x.width + heads))

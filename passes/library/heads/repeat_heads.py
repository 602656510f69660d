"""Repeat key and value heads, so that fewer query heads share one."""

from __future__ import annotations

from weft.ir import Graph, Node, WeftError, ops

from ... import Pass, Trace
from ...edits.edit import rebuild_node
from .head_layout import HeadLayout, apply_layout, find_layouts


class GqaToMha(Pass):
    """Repeat key and value heads until there are `kv_heads`, by default one for every query head.

    With n KV heads, query head h reads number ⌊h·n/heads⌋. If each KV head is repeated r times in place, h reads a copy
    of the same head. With `kv_heads` between 1 and the number of query heads, MQA becomes GQA; without, MHA. A norm
    over all key heads at once keeps its mean. The pass restores the form before mha-to-gqa, not the lost information.

    Condition: k and v come from linears, with only norms, scales, clips and rotations between linear and attention. The
    pass refuses attentions whose present number of KV heads does not divide `kv_heads`, whose number of query heads is
    not a multiple of `kv_heads`, whose keys are also the values, or that have a cache.

    Source: Ainslie 2023, GQA (arXiv 2305.13245), figure 2.

    Example gqa-to-mha::

        graph example {
          input %q: f32[batch, seq, 8]
          input %x: f32[batch, seq, 5]
          param %k.weight: f32[4, 5] = normal([4, 5], std=1.0, stream="k")
          param %v.weight: f32[4, 5] = normal([4, 5], std=1.0, stream="v")
          %k: f32[batch, seq, 4] = linear(%x, %k.weight)
          %v: f32[batch, seq, 4] = linear(%x, %v.weight)
          %y: f32[batch, seq, 8] = attention(%q, %k, %v, heads=4, kv_heads=2, causal=true)
          output y = %y
        }
    """

    name = "gqa-to-mha"
    effect = "exact"
    purpose = "Same function, other weights"
    see = ("mha-to-gqa",)
    tradeoff = "keys and values are computed and cached as often as they are repeated, for targets without groups"
    kv_heads: int | None = None

    def run(self, graph: Graph, trace: Trace) -> None:
        if self.kv_heads is not None and self.kv_heads < 1:
            raise WeftError(f"gqa-to-mha: kv_heads={self.kv_heads} must be positive")
        for node in graph.nodes:
            if node.op is not ops.attention:
                continue
            kv_heads = self.kv_heads or node.attrs["heads"]
            if kv_heads != node.attrs["kv_heads"]:
                trace.record_result(self.name, node.output.name, _repeat_heads(node, kv_heads))


def _repeat_heads(node: Node, count: int) -> str | None:
    """Repeat KV heads of the attention `node` up to `count` and return None; return a reason (str) if impossible."""
    heads, kv_heads = node.attrs["heads"], node.attrs["kv_heads"]
    if count % kv_heads:
        return f"{count} is not a multiple of its {kv_heads} KV heads; mha-to-gqa merges heads"
    if heads % count:
        return f"{count} KV heads do not divide its {heads} query heads"
    if node.operand("past_k") is not None:
        return "it has a cache of its KV heads; run gqa-to-mha before kv-cache"
    if node.operand("v") is None:
        return "its keys are its values too"
    repeated = tuple(h * kv_heads // count for h in range(count))
    layouts = find_layouts(node, "kv", lambda role, _, width: HeadLayout(repeated, width))
    if isinstance(layouts, str):
        return layouts
    apply_layout(node, layouts)
    rebuild_node(node, kv_heads=count)
    return None

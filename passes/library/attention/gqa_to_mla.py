"""Convert grouped-query attention to multi-head latent attention."""

from __future__ import annotations

from weft.ir import Graph, Node, Recipe, ops
from weft.ir.recipes import Concat, Full, Slice
from weft.ir.recipes.matrices import Identity

from ... import Pass, Trace
from ...analysis.projections import Branch, slice_rows, unpack_branch
from ..heads.head_layout import HeadLayout, find_layouts
from .latent_attention import Linear, attend_to_latent


class GqaToMla(Pass):
    """Convert grouped-query to multi-head latent attention: keys and values of all heads are computed from one latent.

    The latent is the old keys and values, c = [W_K; W_V] x, of rank kv_heads·(d + dv), with d and dv the features of a
    key and of a value head; W_UK and W_UV copy it to the query heads of each group. Every GQA is an MLA of that rank.
    After the conversion W_UK and W_UV can be trained freely, and mla-absorb keeps the cache as small as before. All
    heads of MLA share the rotary features of the keys, which are cached next to the latent. With a single KV head, all
    query heads share them before.

    Condition: k and v come from linears of one value, q from a linear, with only reshapes and at most one RoPE of q and
    one of k in between. The pass refuses attentions with several rotated KV heads (mha-to-gqa merges them into one),
    with keys rotated entirely (no features for a latent), with a KV head per query head, or with a cache.

    Source: Meng 2025, TransMLA (arXiv 2502.07864), section 3; DeepSeek-AI 2024, DeepSeek-V2 (arXiv 2405.04434).

    Example gqa-to-mla::

        graph example {
          input %x: f32[batch, seq, 5]
          param %q.weight: f32[8, 5] = normal([8, 5], std=0.5, stream="q")
          param %k.weight: f32[2, 5] = normal([2, 5], std=0.5, stream="k")
          param %v.weight: f32[2, 5] = normal([2, 5], std=0.5, stream="v")
          %q: f32[batch, seq, 8] = linear(%x, %q.weight)
          %k: f32[batch, seq, 2] = linear(%x, %k.weight)
          %v: f32[batch, seq, 2] = linear(%x, %v.weight)
          %y: f32[batch, seq, 8] = attention(%q, %k, %v, heads=4, kv_heads=1, causal=true)
          output y = %y
        }
    """

    name = "gqa-to-mla"
    effect = "exact"
    purpose = "Convert heads, cut heads and layers"
    see = ("mha-to-gqa",)
    tradeoff = "matrix products copy keys and values to every query head, until W_UK and W_UV are trained or absorbed"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            if node.op is ops.attention and node.operand("v") is not None:
                trace.record_result(self.name, node.output.name, _convert_attention(node))


def _convert_attention(node: Node) -> str | None:
    """Replace the attention `node` by latent attention and return None; return a reason (str) if that is impossible."""
    heads, kv_heads = int(node.attrs["heads"]), int(node.attrs["kv_heads"])
    if node.operand("past_k") is not None:
        return "it has a cache of its KV heads; run gqa-to-mla before kv-cache"
    if node.attrs["cache_bits"] is not None:
        return "its cache has scales of its KV heads; run gqa-to-mla before quantize-cache"
    if heads == kv_heads:
        return "every query head has its own KV head"
    layouts = find_layouts(node, "qkv", lambda role, n, width: HeadLayout(tuple(range(n)), width))
    if isinstance(layouts, str):
        return layouts
    branches = {role: branch for role, (branch, _) in layouts.items()}
    for role, branch in branches.items():
        if not branch.has_plain_path or sum(n.op is ops.rope for n in branch.between) > (role != "v"):
            return f"{role} is normalized, scaled or rotated on its way from the linear to the attention"
    x, d = branches["k"].linear.inputs[0], branches["k"].start.width // kv_heads
    if x is None or branches["v"].linear.inputs[0] is not x:
        return "its keys and values are computed from different values"
    frequencies = None if branches["k"].rope is None else branches["k"].rope.operand("frequencies")
    rotary = 0 if frequencies is None else 2 * frequencies.width
    if rotary and kv_heads > 1:
        return f"its {kv_heads} KV heads are rotated separately; mha-to-gqa{{kv_heads=1}} merges them into one"
    if rotary == d:
        return "its keys are rotated entirely, which leaves no features for a latent"
    q, k, v = (unpack_branch(node, role) for role in "qkv")
    plain_dim, dv, groups = d - rotary, v.start.width // kv_heads, [h * kv_heads // heads for h in range(heads)]
    k_rank, rank = kv_heads * plain_dim, kv_heads * (plain_dim + dv)
    linears = {
        "latent": _cut_rows((k, [(g * d + rotary, (g + 1) * d) for g in range(kv_heads)]), (v, [(0, kv_heads * dv)])),
        "k_up": _copy_features(rank, [(g * plain_dim, (g + 1) * plain_dim) for g in groups]),
        "v_up": _copy_features(rank, [(k_rank + g * dv, k_rank + (g + 1) * dv) for g in groups]),
    }
    if rotary:
        linears["q"] = _cut_rows((q, [(h * d + rotary, (h + 1) * d) for h in range(heads)]))
        linears["q_rope"] = _cut_rows((q, [(h * d, h * d + rotary) for h in range(heads)]))
        linears["k_rope"] = _cut_rows((k, [(0, rotary)]))
    attend_to_latent(node, linears)
    return None


Spans = list[tuple[int, int]]  # rows, from the first to before the second


def _cut_rows(*parts: tuple[Branch, Spans]) -> Linear:
    """Return weight and bias (None if no branch has one) of a linear with the row spans of each branch's linear."""
    weights, biases = list[Recipe](), list[Recipe]()
    for branch, spans in parts:
        reader, b = branch.linear.graph.reader, branch.bias
        for start, stop in spans:
            weights.append(slice_rows(branch.weight.recipe, start, stop, reader))
            biases.append(Full(0.0, (stop - start,)) if b is None else slice_rows(b.recipe, start, stop, reader))
    has_bias = any(branch.bias is not None for branch, _ in parts)
    return Concat(tuple(weights)), Concat(tuple(biases)) if has_bias else None


def _copy_features(rank: int, spans: Spans) -> Linear:
    """Return the weight [features, rank] that selects the features `spans` of a latent, and no bias."""
    return Concat(tuple(Slice(Identity(rank), 0, start, stop) for start, stop in spans)), None

"""Pad attention heads to a size that fused kernels accept."""

from __future__ import annotations

import math
from dataclasses import replace

from weft.ir import Graph, Node, WeftError, ops

from ... import Pass, Trace
from ...analysis.projections import find_output_linear
from ...edits.edit import rebuild_node
from .head_layout import HeadLayout, apply_layout, compute_norm_growth, find_layouts, rearrange_columns

LARGEST_MULTIPLE = 1024


class PadHeadDim(Pass):
    """Pad the head dimension with zeros to a multiple of `multiple`, such as 8 or 16, as fused kernels require.

    Zeros appended to q and k add nothing to a score; zeros appended to v give zeros in the output, for which W_o gets
    zero columns. The scale stays that of the old size d, and RoPE rotates the same features as before. An RMSNorm over
    a padded head of size d' averages the squares over more features: with ε·d/d' its output is exactly √(d'/d) times as
    large. For each such norm of queries or keys, the scale is divided by √(d'/d).

    Condition: q, k and v come from linears and a linear reads the result. The pass refuses attentions with a node
    between linear and attention that maps zeros to other values (a LayerNorm, an added constant, a clip without 0 in
    its range, or any clip, factor or sum after a norm), a norm of the values, values in the keys, or a cache.

    Source: Dao 2022, FlashAttention (arXiv 2205.14135), whose kernels are for such sizes; linearity.

    Example pad-head-dim{multiple=8}, on the graph of mha-to-gqa.
    """

    name = "pad-head-dim"
    effect = "exact"
    purpose = "Same function, other weights"
    tradeoff = "zeros are multiplied and cached, for kernels that accept no other sizes"
    multiple: int = 8

    def run(self, graph: Graph, trace: Trace) -> None:
        if not 1 <= self.multiple <= LARGEST_MULTIPLE:
            raise WeftError(f"pad-head-dim: multiple={self.multiple} must be from 1 to {LARGEST_MULTIPLE}")
        for node in graph.nodes:
            if node.op is ops.attention:
                trace.record_result(self.name, node.output.name, _pad_heads(node, self.multiple))


def _pad_heads(node: Node, multiple: int) -> str | None:
    """Pad the heads of attention `node`; return None, "" if their sizes are multiples already, or a reason (str)."""
    heads, scale = node.attrs["heads"], node.attrs["scale"]
    width = node.required_operand("q").width // heads
    if width % multiple == 0 and node.output.width // heads % multiple == 0:
        return ""
    if node.operand("past_k") is not None:
        return "it has a cache of its heads; run pad-head-dim before kv-cache"
    if node.operand("v") is None:
        return "its keys are its values too"
    layouts = find_layouts(node, "qkv", lambda role, n, d: HeadLayout(tuple(range(n)), d, -d % multiple))
    if isinstance(layouts, str):
        return layouts
    q_gain, k_gain, v_gain = (compute_norm_growth(branch, layout) for branch, layout in layouts.values())
    if v_gain != 1:
        return "its values come from a norm"
    o, (_, value_layout) = find_output_linear(node), layouts["v"]
    if isinstance(o, str):
        return o
    apply_layout(node, {role: pair for role, pair in layouts.items() if pair[1].zeros})
    rebuild_node(node, scale=(1.0 / math.sqrt(width) if scale is None else scale) / q_gain / k_gain)
    if value_layout.zeros:
        rearrange_columns(o, replace(value_layout, heads=tuple(range(heads))))
    return None

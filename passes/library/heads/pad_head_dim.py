"""Pad attention heads to a size that fused kernels accept."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, WeftError, ops

from ...analysis.projections import Branch, find_branch, find_output_linear, unpack_branch
from ...core.base import Pass
from ...core.trace import Trace
from ...edits.edit import rebuild_node, replace_param
from .head_layout import HeadLayout, apply_layout, compute_norm_growth, find_obstacle

LARGEST_MULTIPLE = 1024


@dataclass(frozen=True)
class PadHeadDim(Pass):
    """Pad the head dimension with zeros to a `multiple` of 8 or 16, the sizes that fused kernels accept.

    Zeros appended to q and k add nothing to a score; zeros appended to v give zeros in the output, for which W_o gets
    zero columns. The scale stays that of the old size d, and RoPE rotates the same features as before. An RMSNorm over
    a padded head of size d' averages the squares over more features: with ε·d/d' its output is exactly √(d'/d) times as
    large, and the scale is divided by that.

    Condition: q, k and v come from linears and a linear reads the result. The pass refuses attentions with a node
    between linear and attention that maps zeros to other values (a LayerNorm, an added constant, a clip whose range
    excludes 0), with keys that are also the values, or with a cache.

    Source: Dao 2022, FlashAttention (arXiv 2205.14135), whose kernels are for such sizes; linearity.

    Example pad-head-dim{multiple=8}::

        graph example {
          input %x: f32[batch, seq, 6]
          param %q.weight: f32[12, 6] = normal([12, 6], std=1.0, stream="q")
          param %k.weight: f32[6, 6] = normal([6, 6], std=1.0, stream="k")
          param %v.weight: f32[10, 6] = normal([10, 6], std=1.0, stream="v")
          param %o.weight: f32[6, 20] = normal([6, 20], std=1.0, stream="o")
          %q: f32[batch, seq, 12] = linear(%x, %q.weight)
          %k: f32[batch, seq, 6] = linear(%x, %k.weight)
          %v: f32[batch, seq, 10] = linear(%x, %v.weight)
          %y: f32[batch, seq, 20] = attention(%q, %k, %v, heads=4, kv_heads=2, causal=true)
          %o: f32[batch, seq, 6] = linear(%y, %o.weight)
          output o = %o
        }
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
            if node.op is not ops.attention:
                continue
            reason = _pad_heads(node, self.multiple)
            if reason:
                trace.refuse(self.name, node.output.name, reason)
            elif reason is None:
                trace.record_rewrite(self.name, node.output.name)


def _pad_heads(node: Node, multiple: int) -> str | None:
    """Pad the heads of the attention `node` and return None. Return "" if their sizes are multiples already, and a
    reason (str) if padding is impossible."""
    heads, kv_heads, scale = node.attrs["heads"], node.attrs["kv_heads"], node.attrs["scale"]
    q, v = node.operand("q"), node.operand("v")
    assert q is not None
    width = q.width // heads
    if width % multiple == 0 and node.output.width // heads % multiple == 0:
        return ""
    if node.operand("past_k") is not None:
        return "it has a cache of its heads; run pad-head-dim before kv-cache"
    if v is None:
        return "its keys are its values too"
    factor = 1.0 / math.sqrt(width) if scale is None else scale
    layouts: dict[str, HeadLayout] = {}
    for role, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        branch = find_branch(node, role)
        if isinstance(branch, str):
            return branch
        head_dim = branch.start.width // count
        layout = HeadLayout(tuple(range(count)), head_dim, -head_dim % multiple)
        if (reason := find_obstacle(branch, layout)) is not None:
            return reason
        gain = compute_norm_growth(branch, layout)
        if role == "v" and gain != 1:
            return "its values come from a norm"
        layouts[role], factor = layout, factor / gain
    o = find_output_linear(node)
    if isinstance(o, str):
        return o
    branches: dict[str, tuple[Branch, HeadLayout]] = {}
    for role, layout in layouts.items():
        if layout.zeros:
            branches[role] = unpack_branch(node, role), layout
    apply_layout(node, branches)
    weight = o.operand("weight")
    assert isinstance(weight, Param)
    values = HeadLayout(tuple(range(heads)), layouts["v"].width, layouts["v"].zeros)
    padded_weight = weight if values.is_identity else values.derive_param(weight, axis=1)
    padded = rebuild_node(node, scale=factor)
    if padded_weight is not weight:
        rebuild_node(o, {"x": padded.output, "weight": padded_weight})
        replace_param(weight, padded_weight)
    return None

"""Heads of a size that kernels take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, WeftError, ops

from ...analysis.projections import Branch, branch_of, output_of, unpacked
from ...core.base import Pass
from ...core.trace import Trace
from ...edits.edit import changed, replace_param
from .head_layout import Layout, apply_layout, growth, misfit

MOST = 1024  # numbers that a head is made a multiple of


@dataclass(frozen=True)
class PadHeadDim(Pass):
    """Pad heads with zeros to a `multiple` of 8 or 16, the sizes that fused kernels take.

    Zeros behind the numbers of q and k add nothing to a score, those behind v make zeros that meet columns of zeros in
    W_o. The scale stays that of the old size d, and RoPE turns as many numbers as before. An RMSNorm over heads of d'
    with zeros takes the mean of squares over more of them: with ε·d/d' it makes just √(d'/d) times as much, by which
    the scale is divided.

    Condition: q, k and v come from linears and a linear reads the result. Refused where something between makes other
    numbers of zeros (a LayerNorm, an added constant, a clip that leaves 0 out), where keys are values too, and where
    there are caches.

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
    tradeoff = "zeros are multiplied and cached, for kernels that take no other sizes"
    multiple: int = 8

    def run(self, graph: Graph, trace: Trace) -> None:
        if not 1 <= self.multiple <= MOST:
            raise WeftError(f"pad-head-dim: multiple={self.multiple} must be from 1 to {MOST}")
        for node in graph.nodes:
            if node.op is not ops.attention:
                continue
            reason = _padded(node, self.multiple)
            if reason:
                trace.refuse(self.name, node.output.name, reason)
            elif reason is None:
                trace.fired(self.name, node.output.name)


def _padded(node: Node, multiple: int) -> str | None:
    """Pad the heads of `node`; or why not, an empty reason if they have the size."""
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
    layouts: dict[str, Layout] = {}
    for role, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        branch = branch_of(node, role)
        if isinstance(branch, str):
            return branch
        each = branch.start.width // count
        layout = Layout(tuple(range(count)), each, -each % multiple)
        if (reason := misfit(branch, layout)) is not None:
            return reason
        grown = growth(branch, layout)
        if role == "v" and grown != 1:
            return "a norm makes its values"
        layouts[role], factor = layout, factor / grown
    o = output_of(node)
    if isinstance(o, str):
        return o
    sides: dict[str, tuple[Branch, Layout]] = {}
    for role, layout in layouts.items():
        if layout.zeros:
            sides[role] = unpacked(node, role), layout
    apply_layout(node, sides)
    weight = o.operand("weight")
    assert isinstance(weight, Param)
    values = Layout(tuple(range(heads)), layouts["v"].width, layouts["v"].zeros)
    new = weight if values.plain else values.derived(weight, axis=1)
    padded = changed(node, scale=factor)
    if new is not weight:
        changed(o, {"x": padded.output, "weight": new})
        replace_param(weight, new)
    return None

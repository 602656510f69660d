"""Unpack linears: the inverse of pack-qkv and pack-gate-up."""

from __future__ import annotations

from weft.ir import Graph, ops

from ... import Pass, Trace
from ...analysis.projections import split_linear
from ...edits.edit import are_params, is_feature_split


class Unpack(Pass):
    """Split a packed linear into separate linears.

    split(linear(x, [A; B])) becomes linear(x, A), linear(x, B). The new weights are rows of the packed weight. If that
    is a Concat recipe, they are its items.

    Condition: the split cuts the last axis, and nothing else reads the packed result.

    Source: linearity, [A; B] x = [A x; B x].

    Example unpack::

        graph example {
          input %x: f32[batch, seq, 4]
          param %qkv.weight: f32[8, 4] = normal([8, 4], std=0.5, stream="qkv")
          %qkv: f32[batch, seq, 8] = linear(%x, %qkv.weight)
          %q: f32[batch, seq, 4], %k: f32[batch, seq, 2], %v: f32[batch, seq, 2] = split(%qkv, sizes=[4, 2, 2])
          output q = %q
          output k = %k
          output v = %v
        }
    """

    name = "unpack"
    effect = "exact"
    purpose = "Fuse and take apart"
    see = ("pack-qkv", "pack-gate-up")
    tradeoff = "several small products instead of a large one: equal FLOPs, but each reads x"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            x = node.inputs[0] if node.inputs else None
            if node.op is not ops.split or x is None or x.producer is None or x.producer.op is not ops.linear:
                continue
            at = node.output.name
            if not is_feature_split(node):
                trace.refuse(self.name, at, f"the split cuts axis {node.attrs['axis']}, not the last")
            elif len(x.users) > 1 or x.is_output:
                trace.refuse(self.name, at, f"%{x.name} has other readers")
            elif not are_params(x.producer.inputs[1:]):
                trace.refuse(self.name, at, f"the weight of %{x.name} is computed")
            else:
                split_linear(node)
                trace.record_rewrite(self.name, at)

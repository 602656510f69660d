"""Gated linear units from elementwise ops."""

from __future__ import annotations

from weft.ir import Graph, ops

from ... import Pass, Trace
from ...analysis.feed_forward import GatedUnit, match_gate
from ...edits.edit import erase_unused, replace_uses


class FuseGlu(Pass):
    """Fuse gated units: act(gate) ⊙ up becomes the op `glu`.

    The activation may be any that `glu` supports, as one op or as a formula of several (x·σ(βx), max(0, x)²), or the
    identity (bilinear). Clamps and a shift of up, as in gpt-oss, become `limit` and `shift`. Backends, and passes that
    match feed-forwards, then see a single op.

    Condition: gate and up are projections of the same value, by two linears or by one linear and a split. Other
    products, such as the gates of attention and state-space layers, stay.

    Source: Shazeer 2020 (2002.05202), definition.

    Example fuse-glu::

        graph example {
          input %x: f32[batch, seq, 4]
          param %gate.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="gate")
          param %up.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="up")
          %gate: f32[batch, seq, 6] = linear(%x, %gate.weight)
          %up: f32[batch, seq, 6] = linear(%x, %up.weight)
          %open: f32[batch, seq, 6] = sigmoid(%gate)
          %silu: f32[batch, seq, 6] = mul(%gate, %open)
          %gated: f32[batch, seq, 6] = mul(%silu, %up)
          output y = %gated
        }
    """

    name = "fuse-glu"
    effect = "exact"
    purpose = "Fuse and take apart"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            gate = match_gate(node) if node.op is ops.mul else None
            if isinstance(gate, str):
                trace.refuse(self.name, node.output.name, gate)
            elif isinstance(gate, GatedUnit):
                with graph.inserting(before=node):
                    unit = ops.glu(gate.gate, gate.up, **gate.attrs)
                trace.record_rewrite(self.name, node.output.name)
                replace_uses(node.output, unit)
                erase_unused(graph, gate.nodes)

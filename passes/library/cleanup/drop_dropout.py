"""Removal of dropout, which only acts in training."""

from __future__ import annotations

from weft.ir import Graph, ops

from ... import Pass, Trace
from ...edits.edit import replace_uses


def has_dropout(graph: Graph) -> bool:
    """Return whether `graph` has a node `dropout`."""
    return any(node.op is ops.dropout for node in graph.nodes)


class DropDropout(Pass):
    """Remove dropout: dropout(x) → x, as in inference.

    Condition: none; a PyTorch module of the resulting graph trains without dropout.

    Source: Srivastava 2014, JMLR 15, section 4, which scales weights at test time; the op scales activations in
    training.

    Example drop-dropout::

        graph example {
          input %x: f32[batch, seq, 4]
          param %w: f32[4, 4] = normal([4, 4], std=0.5, stream="w")
          %hidden: f32[batch, seq, 4] = linear(%x, %w)
          %dropped: f32[batch, seq, 4] = dropout(%hidden, share=0.1)
          %y: f32[batch, seq, 4] = add(%x, %dropped)
          output y = %y
        }
    """

    name = "drop-dropout"
    effect = "exact"
    purpose = "Simplify"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            if node.op is ops.dropout:
                trace.record_rewrite(self.name, node.output.name)
                replace_uses(node.output, node.required_operand("x"), rename=False)
                graph.erase(node)

"""The inverse of fuse-residual-norm."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import Graph

from ..base import Pass
from ..trace import Trace


@dataclass(frozen=True)
class UnfuseResidualNorm(Pass):
    """Add, then normalize: add_norm(x, y) → norm(x + y), and x + y for everyone else who reads the sum.

    The inverse of fuse-residual-norm, for targets without such a kernel and passes that look for plain norms.

    Condition: none.

    Source: the definition of add_norm.

    Example unfuse-residual-norm::

        graph example {
          input %x: f32[batch, seq, 4]
          input %y: f32[batch, seq, 4]
          param %norm.weight: f32[4] = normal([4], std=0.5, stream="g", mean=1.0)
          %normed: f32[batch, seq, 4], %sum: f32[batch, seq, 4] = add_norm(%x, %y, %norm.weight)
          output normed = %normed
          output sum = %sum
        }
    """

    name = "unfuse-residual-norm"
    effect = "exact"
    tradeoff = "the sum is written to memory and read again before it is normalized"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            if node.op.name != "add_norm":
                continue
            trace.fired(self.name, node.output.name)
            with graph.inserting(before=node):
                graph.replace(node, *node.op.expand(node))

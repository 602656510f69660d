"""The inverse of fuse-residual-norm."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import Graph, Value, ops

from ...core.base import Pass
from ...core.trace import Trace


@dataclass(frozen=True)
class UnfuseResidualNorm(Pass):
    """Add, then normalize: add_norm(x, y) → norm(x + y), and x + y for everyone else who reads the sum.

    The inverse of fuse-residual-norm, for targets without such a kernel and passes that look for plain norms.

    The sum stands in the scope that its name tells, if a term of it does: that of the layer that it ends.

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
    purpose = "Fuse and take apart"
    on_fused = True
    see = ("fuse-residual-norm",)
    tradeoff = "the sum is written to memory and read again before it is normalized"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            if node.op is not ops.add_norm:
                continue
            trace.fired(self.name, node.output.name)
            with graph.inserting(before=node):
                normed, total = node.op.expand(node)
            graph.replace(node, normed, total)
            _settle(total)


def _settle(total: Value) -> None:
    """Move a sum to the scope that it is named after, if one of its terms is made in there; to the top, if all are."""
    made, home = total.producer, total.name.rpartition(".")[0]
    assert made is not None
    scopes = [term.producer.scope for term in made.inputs if term is not None and term.producer is not None]
    if any(f"{scope}.".startswith(f"{home}.") for scope in scopes) if home else not any(scopes):
        made.scope = home

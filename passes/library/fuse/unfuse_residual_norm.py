"""The inverse of fuse-residual-norm."""

from __future__ import annotations

from weft.ir import Graph, Value, ops

from ... import Pass, Trace


class UnfuseResidualNorm(Pass):
    """Split addition and norm: add_norm(x, y) → norm(x + y), and x + y for other readers of the sum.

    This is the inverse of fuse-residual-norm, for targets without such a kernel and passes that match plain norms. The
    sum is moved to the scope that its name begins with (the layer whose output it is), if a term is in that scope.

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
            trace.record_rewrite(self.name, node.output.name)
            with graph.inserting(before=node):
                normed, total = node.op.expand(node)
            graph.replace(node, normed, total)
            _move_to_scope(total)


def _move_to_scope(total: Value) -> None:
    """Move the sum `total` to the scope in its name if a term is in it; to the scope "" only if all terms are."""
    addition, home = total.producer, total.name.rpartition(".")[0]
    assert addition is not None
    scopes = [term.producer.scope for term in addition.inputs if term is not None and term.producer is not None]
    if any(f"{scope}.".startswith(f"{home}.") for scope in scopes) if home else not any(scopes):
        addition.scope = home

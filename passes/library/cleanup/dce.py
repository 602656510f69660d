"""Dead code elimination."""

from __future__ import annotations

from weft.ir import Graph

from ... import Pass, Trace


class Dce(Pass):
    """Remove nodes and parameters that no output depends on.

    Graph inputs stay: they are the interface.

    Condition: no output depends on a removed node, directly or through other nodes.

    Source: Aho, Lam, Sethi and Ullman, Compilers, second edition (2006), 9.1.

    Example dce::

        graph example {
          input %x: f32[batch, 4]
          param %w: f32[3, 4] = normal([3, 4], std=1.0, stream="w")
          param %unread: f32[4] = normal([4], std=1.0, stream="unread")
          %half: f32[batch, 4] = affine(%x, by=0.5)
          %unused: f32[batch, 4] = mul(%half, %unread)
          %y: f32[batch, 3] = linear(%x, %w)
          output y = %y
        }
    """

    name = "dce"
    effect = "exact"
    purpose = "Simplify"
    on_fused = True

    def run(self, graph: Graph, trace: Trace) -> None:
        # Backwards: the dead readers of a node are erased before it is visited.
        for node in reversed(graph.nodes):
            if not any(v.uses or v.is_output for v in node.outputs):
                trace.record_rewrite("dead node", node.output.name)
                graph.erase(node)
        for param in list(graph.params.values()):
            if not param.uses and not param.is_output:
                trace.record_rewrite("dead parameter", param.name)
                graph.erase_param(param)

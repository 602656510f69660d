"""A pass."""

from dataclasses import dataclass

from weft.ir import Graph, ops
from weft.passes import Pass, Trace


@dataclass(frozen=True)
class SwapAdds(Pass):
    """Swap the operands of every addition."""

    name = "swap-adds"
    effect = "exact"
    idempotent = False

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in list(graph.nodes):
            if node.op is ops.add:
                with graph.inserting(before=node):
                    node.output.replace_uses(ops.add(*reversed(node.inputs)))
                graph.erase(node)
                trace.record_rewrite(self.name, "add")

"""Dead code elimination."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import Graph

from ..base import Pass
from ..trace import Trace


@dataclass(frozen=True)
class Dce(Pass):
    """Remove nodes and parameters that no output depends on. Graph inputs stay: they are the interface."""

    name = "dce"
    effect = "exact"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.reversed_nodes:
            if not any(v.uses or v.is_output for v in node.outputs):
                trace.fired("dead node", node.output.name)
                graph.erase(node)
        for param in list(graph.params.values()):
            if not param.uses and not param.is_output:
                trace.fired("dead parameter", param.name)
                graph.erase_param(param)

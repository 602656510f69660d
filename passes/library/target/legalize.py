"""Expand ops that a target cannot lower into simpler ops."""

from __future__ import annotations

from weft.ir import Graph

from ... import Pass, Trace
from ...edits.legalization import ACCEPTS, legalize


class Legalize(Pass):
    """Replace ops by their bodies until the `target` has a lowering for every op.

    A target may compile several forms of one graph, which differ in the ops that have lowerings. `form` is the name of
    one (see `weft targets NAME`); "" is the whole model. The trace lists why lowerings refuse ops.

    Condition: none; an op that has no lowering and no body is an error.

    Source: the bodies of ops, see `weft ops NAME`; the term is that of LLVM's instruction selection.

    Example legalize{target=onnx}, on the graph of unfuse-residual-norm.
    """

    name = "legalize"
    effect = "exact"
    purpose = "Targets"
    on_fused = True
    tradeoff = "a body may compute more than a kernel"
    target: str
    form: str = ""

    def run(self, graph: Graph, trace: Trace) -> None:
        legalize(graph, ACCEPTS.lookup(self.target)(graph, self.form), trace)
        if not trace.rewrites:
            trace.note(f"{self.name}: target {self.target} takes every op")

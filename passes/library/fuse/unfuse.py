"""The inverse of the passes that fuse a decode step."""

from __future__ import annotations

from weft.ir import Graph, ops

from ... import Pass, Trace
from ...edits.legalization import is_fused, legalize


class Unfuse(Pass):
    """Replace fused ops by their bodies, until only simple ops are left: the inverse of the pipeline decode-torch.

    With `all`, also replace add_norm and every norm_linear; otherwise these stay (a norm_linear only if it has a norm
    without weight and no activation), because other passes and targets support them. A pack becomes a concatenation,
    which fold-constants folds into one weight. The rotation in a norm_qkv becomes arithmetic instead of the op rope,
    which backends do not fuse with attention: keep the original graph if you need rope.

    Condition: none.

    Source: the definition of fused ops.

    Example unfuse::

        graph example {
          input %x: f32[batch, seq, 4]
          param %g: f32[4] = normal([4], std=0.5, stream="g", mean=1.0)
          param %gate.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="gate")
          param %up.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="up")
          %gate_up: f32[12, 4] = pack(%gate.weight, %up.weight)
          %y: f32[batch, seq, 6] = norm_glu(%x, %gate_up, _, %g)
          output y = %y
        }
    """

    name = "unfuse"
    needs = "fuse-mixture, fuse-norm-linear{fold=false}, fuse-activation"
    effect = "exact"
    purpose = "Fuse and take apart"
    see = ("fuse-norm-linear", "fuse-activation", "fuse-qkv")
    tradeoff = "every op writes its result to memory, and packed weights are copied"
    on_fused = True
    all: bool = False

    def run(self, graph: Graph, trace: Trace) -> None:
        also_fused = (ops.add_norm, ops.norm_linear) if self.all else ()
        legalize(graph, lambda node: ["it is fused"] if is_fused(node) or node.op in also_fused else None, trace)

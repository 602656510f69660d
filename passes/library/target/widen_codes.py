"""Widen codes of weights for which a target has no kernel."""

from __future__ import annotations

from weft.ir import Graph
from weft.ir.recipes.blocks import BlockRecipe, widen_small_floats

from ... import Pass, Trace


def has_float4_weights(graph: Graph) -> bool:
    """Return whether `graph` has weights that a pass rounded to 4-bit floats."""
    quantized = (p for p in graph.params.values() if p.recipe.has(BlockRecipe))
    return any(widen_small_floats(p.recipe, graph.reader) != p.recipe for p in quantized)


class WidenCodes(Pass):
    """Store weights that quantize rounded to 4-bit floats (NVFP4, MXFP4) as 8-bit integers of the same values.

    Codes are doubled, the scales of their blocks halved: 0, ½, 1, 1½, 2, 3, 4, 6 become 0, 1, 2, 3, 4, 6, 8, 12.
    ONNX Runtime has no CPU kernel that reads FLOAT4E2M1.

    Condition: the checkpoint can be read, because recipes do not contain the dtypes of its tensors.

    Source: OCP Microscaling Formats (MX) v1.0, 2023, section 5.3.3, FP4 E2M1.

    Example widen-codes::

        graph example {
          input %x: f32[batch, seq, 32]
          param %w: f32[4, 32] = to_float4(normal([4, 32], std=0.5, stream="w"))
          %y: f32[batch, seq, 4] = linear(%x, %w)
          output y = %y
        }
    """

    name = "widen-codes"
    effect = "exact"
    purpose = "Targets"
    on_fused = True
    see = ("quantize",)
    tradeoff = "the weights take twice the memory"

    def run(self, graph: Graph, trace: Trace) -> None:
        for param in graph.params.values():
            widened = widen_small_floats(param.recipe, graph.reader) if param.recipe.has(BlockRecipe) else param.recipe
            if widened != param.recipe:
                param.recipe = widened
                trace.record_rewrite(self.name, param.name)
        if not trace.rewrites[self.name]:
            trace.note(f"{self.name}: no weight is stored as floats of 4 bits")

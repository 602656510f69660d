"""Mark weights that products read as stored codes, and widen codes for which a target has no kernel."""

from __future__ import annotations

from typing import Literal

from weft.ir import Graph
from weft.ir.recipes.blocks import BlockRecipe, Kept, widen_small_floats

from ... import Pass, Trace


class KeepBlocks(Pass):
    """Mark weights whose products targets compute from the stored blocks of codes, not from dequantized values.

    `which` selects matrices: all not rounded by quantize (all), of these those with one row per token id (head), or all
    that quantize rounded (quantized). Products with quantized weights use their blocks even without this mark; with it,
    they are computed in f32, without rounding activations to 8 bits. With activations=fp8, products of many tokens with
    FP8 blocks round activations to FP8. A target that cannot read the blocks dequantizes the weight.

    Condition: none; the weights keep their values.

    Source: Dettmers 2022 (LLM.int8), arXiv:2208.07339; GGUF, the block formats of ggml.

    Example keep-blocks::

        graph example {
          input %x: f32[batch, seq, 32]
          param %w: f32[4, 32] = normal([4, 32], std=0.5, stream="w")
          %y: f32[batch, seq, 4] = linear(%x, %w)
          output y = %y
        }
    """

    name = "keep-blocks"
    effect = "exact"
    purpose = "Targets"
    on_fused = True
    see = ("quantize", "widen-codes")
    which: Literal["all", "head", "quantized"] = "all"
    activations: Literal["", "fp8"] = ""

    def run(self, graph: Graph, trace: Trace) -> None:
        for param in graph.params.values():
            recipe = param.recipe.item if isinstance(param.recipe, Kept) else param.recipe
            marked_recipe = Kept(recipe, self.activations)
            quantized, head = recipe.has(BlockRecipe), param.shape[:1] == (graph.meta.get("vocab"),)
            is_selected = {"all": not quantized, "head": head and not quantized, "quantized": quantized}[self.which]
            if is_selected and param.type.rank > 1 and not recipe.is_constant and param.recipe != marked_recipe:
                param.recipe = marked_recipe
                trace.record_rewrite(self.name, param.name)
        if not trace.rewrites:
            trace.note(f"{self.name}: it selects no weight")


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

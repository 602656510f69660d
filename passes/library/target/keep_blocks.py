"""Weights that are multiplied by as the blocks that they are stored in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.ir import Graph
from weft.ir.recipes.blocks import BlockRecipe, Kept

from ...core.base import Pass
from ...core.trace import Trace


@dataclass(frozen=True)
class KeepBlocks(Pass):
    """Mark weights by whose blocks of codes targets multiply, instead of by dequantized values.

    `which` weights: all, those of the output head (a row for each token), or those that the pass quantize made blocks
    of, which are blocks anyway: sums with them are then computed in f32, without rounding activations to 8 bits. What
    many tokens multiply with blocks of FP8 is rounded to `activations`, if that says so. A target that cannot read the
    blocks of a weight reads its numbers.

    Condition: none; the weights are the same numbers.

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
            kept = Kept(recipe, self.activations)
            quantized, head = recipe.has(BlockRecipe), param.shape[:1] == (graph.meta.get("vocab"),)
            asked = {"all": not quantized, "head": head and not quantized, "quantized": quantized}[self.which]
            if asked and param.type.rank > 1 and not recipe.constant and param.recipe != kept:
                param.recipe = kept
                trace.fired(self.name, param.name)
        if not trace.rewrites:
            trace.note(f"{self.name}: no weight is one of those asked for")

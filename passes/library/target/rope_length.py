"""Fix RoPE frequencies that depend on the length of sequences."""

from __future__ import annotations

from dataclasses import replace

from weft.ir import Graph, WeftError
from weft.ir.recipes.frequencies import RopeFrequencies

from ... import Pass, Trace
from ...core.equivalence import EquivalenceCheck


def has_length_dependent_rope(graph: Graph) -> bool:
    """Return whether RoPE frequencies of `graph` depend on the length of sequences (dynamic, longrope)."""
    return any(
        isinstance(p.recipe, RopeFrequencies) and "length" in p.recipe.used_settings for p in graph.params.values()
    )


class RopeLength(Pass):
    """Set RoPE frequencies that depend on the length of sequences to those for sequences of up to `length` tokens.

    Dynamic RoPE has frequencies b^(−2i/d), whose base b grows with the length; LongRoPE has one list of factors for
    sequences within the original context, and one for longer ones. Frequencies that do not depend on the length stay.

    Condition: the model uses these frequencies for all sequences, also for shorter ones.

    Source: Ding 2024 (LongRoPE), arXiv:2402.13753; "Dynamically scaled RoPE", Reddit r/LocalLLaMA 2023 (emozilla).

    Example rope-length{length=64}::

        graph example {
          input %x: f32[batch, seq, 8]
          input %position_ids: i64[batch, seq]
          param %f: f32[2] = rope_frequencies(dim=4, scaling="dynamic", factor=2.0, original=16)
          %y: f32[batch, seq, 8] = rope(%x, %position_ids, %f, heads=2)
          output y = %y
        }
    """

    name = "rope-length"
    effect = "changing"
    purpose = "Positions and windows"
    see = ("extend-context",)
    on_fused = True
    length: int

    def run(self, graph: Graph, trace: Trace) -> None:
        if self.length < 1:
            raise WeftError(f"rope-length: length={self.length} must be positive")
        longer = False
        for param in graph.params.values():
            recipe = param.recipe
            if isinstance(recipe, RopeFrequencies) and "length" in recipe.used_settings:
                longer |= self.length > recipe.original
                if recipe.length != self.length:
                    param.recipe = replace(recipe, length=self.length)
                    trace.record_rewrite(self.name, param.name)
        if longer:
            trace.note(
                f"{self.name}: warning: its RoPE is for sequences of {self.length} tokens; for shorter ones choose a "
                "lower --max-length"
            )
        elif not has_length_dependent_rope(graph):
            trace.note(f"{self.name}: no frequencies depend on the length of sequences")

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that only RoPE frequencies differ: with the previous ones, the graph is the same."""
        restored = after.clone()
        for name, param in restored.params.items():
            param.recipe = before.params[name].recipe
        if str(restored) != str(before):
            raise WeftError(f"{self.name} must change only RoPE frequencies, but other parts of the graph changed")

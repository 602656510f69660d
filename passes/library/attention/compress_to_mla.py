"""Compress grouped-query attention to multi-head latent attention with a smaller cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.ir import Graph, Node, Param, WeftError, ops
from weft.ir.recipes import Concat, Full, Slice
from weft.ir.recipes.readers import Array

from ... import Pass, Trace
from ...analysis.layers import refuse_caches
from ...analysis.projections import Branch, find_branch
from ...core.equivalence import EquivalenceCheck
from ...fitting.calibration import read_tokens
from ...fitting.head_fitting import Fit, Fitter
from ..heads.head_groups import equalize_heads
from .latent_attention import attend_to_latent


class CompressToMla(Pass):
    """Compress grouped-query to multi-head latent attention: `rank` + `rotary` features per token are left to cache.

    - Positions: of the rotary pairs, the rotary/2 with the highest frequencies stay rotated, in keys that all heads
      share, merged as by mha-to-gqa{method=svd}. All other pairs stop to rotate: within short distances they hardly do.
    - Latent: the remaining features of all keys and the values are W_UK c and W_UV c of one latent c = W x of `rank`
      features. W is the best basis of both in the norm of their effects, of keys on scores and of values on outputs,
      each scaled to the same sum over all features.

    Errors are weighted as by mha-to-gqa: by activations on `tokens` tokens of `calibration` (a text file, or token ids
    as .npy or .json); without a file, by the weights alone. With `sequential` and a file, later layers are fitted to
    the outputs of the changed earlier layers, and output projections are refitted by ridge regression. mla-absorb then
    lets the cache hold c and the shared keys instead of keys and values.

    Condition: q, k and v come from linears, k and v from linears of one value, with only reshapes and at most one RoPE
    of q and k in between, and one linear reads the result. The result is exact if keys that stay rotated are equal in
    all heads, all other frequencies are 0 and `rank` is that of keys and values. It is an error if `rotary` is odd or
    there are caches.

    Source: Meng 2025, TransMLA (arXiv 2502.07864); DeepSeek-AI 2024, DeepSeek-V2 (arXiv 2405.04434).

    Example compress-to-mla{rank=3, rotary=2}::

        graph example {
          input %x: f32[batch, seq, 8]
          input %at: i64[batch, seq]
          param %q.weight: f32[16, 8] = normal([16, 8], std=0.5, stream="q")
          param %k.weight: f32[8, 8] = normal([8, 8], std=0.5, stream="k")
          param %v.weight: f32[8, 8] = normal([8, 8], std=0.5, stream="v")
          param %o.weight: f32[8, 16] = normal([8, 16], std=0.5, stream="o")
          param %frequencies: f32[2] = rope_frequencies(4)
          %q: f32[batch, seq, 16] = linear(%x, %q.weight)
          %k: f32[batch, seq, 8] = linear(%x, %k.weight)
          %v: f32[batch, seq, 8] = linear(%x, %v.weight)
          %q_at: f32[batch, seq, 16] = rope(%q, %at, %frequencies, heads=4)
          %k_at: f32[batch, seq, 8] = rope(%k, %at, %frequencies, heads=2)
          %y: f32[batch, seq, 16] = attention(%q_at, %k_at, %v, heads=4, kv_heads=2, causal=true)
          %o: f32[batch, seq, 8] = linear(%y, %o.weight)
          output o = %o
        }
    """

    name = "compress-to-mla"
    effect = "lossy"
    purpose = "Convert heads, cut heads and layers"
    see = ("gqa-to-mla", "mla-absorb", "mha-to-gqa")
    tradeoff = "matrix products compute the keys and values of every query head from the latent, until mla-absorb"
    rank: int
    rotary: int
    calibration: str | None = None
    tokens: int = 8192
    sequential: bool = True

    def run(self, graph: Graph, trace: Trace) -> None:
        if self.rank < 1 or self.rotary < 0 or self.rotary % 2 or self.tokens < 1:
            raise WeftError(
                f"{self.name}: rank={self.rank} and tokens={self.tokens} must be positive, and rotary={self.rotary} an "
                "even number of features"
            )
        refuse_caches(graph, self.name)
        reasons = {n: self._find_reason(n) for n in graph.nodes if n.op is ops.attention and n.operand("v") is not None}
        fitter = None
        if any(reason is None for reason in reasons.values()):
            texts = read_tokens(graph, self.calibration, self.tokens) if self.calibration is not None else ()
            fitter = Fitter(graph, texts, self.sequential)
        for progress, (node, reason) in enumerate(reasons.items()):
            trace.progress(progress, len(reasons))
            name = node.output.name
            if reason is None and fitter is not None:
                pairs = _choose_pairs(node, self.rotary)
                fit = fitter.fit_latent(node, self.rank, pairs)
                if isinstance(fit, Fit):
                    fitter.refit_output(node, attend_to_latent(node, fit.linears, pairs.tolist()), fit)
                reason = fit if isinstance(fit, str) else None
            trace.record_result(self.name, name, reason)

    def _find_reason(self, node: Node) -> str | None:
        """Return a reason (str) against compressing the attention `node`, or None."""
        branches = [find_branch(node, role) for role in "qkv"]
        for branch in branches:
            if isinstance(branch, str):
                return branch
        _, k, v = (b for b in branches if isinstance(b, Branch))
        if k.linear.inputs[0] is not v.linear.inputs[0]:
            return "its keys and values are computed from different values"
        source = k.linear.required_operand("x")
        if source.producer is not None and source.producer.op is ops.linear and source.width <= self.rank:
            return f"its keys and values are computed from a latent of {source.width} features"
        rotary, width = 2 * len(_choose_pairs(node, self.rotary)), k.start.width + v.start.width
        if rotary == k.start.width // int(node.attrs["kv_heads"]):
            return "its keys stay rotated entirely, which leaves no features for a latent"
        if self.rank + rotary > width:
            return f"rank={self.rank} and {rotary} rotated features exceed the {width} of its keys and values"
        return None

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that outputs do not change if heads and frequencies are such that nothing is lost."""
        exact = equivalence.randomize_weights(before)
        for node in [n for n in exact.nodes if n.op is ops.attention]:
            k = find_branch(node, "k")
            if isinstance(k, Branch) and self._find_reason(node) is None:
                equalize_heads(k, int(node.attrs["kv_heads"]), 1)
                frequencies = None if k.rope is None else k.rope.operand("frequencies")
                if isinstance(frequencies, Param):
                    pairs = set(_choose_pairs(node, self.rotary).tolist())
                    # Pair by pair, for frequencies of any order.
                    parts = [Slice(frequencies.recipe, 0, i, i + 1) for i in range(frequencies.width)]
                    recipes = [part if i in pairs else Full(0.0, (1,)) for i, part in enumerate(parts)]
                    if any(isinstance(r, Full) for r in recipes):
                        frequencies.recipe = Concat(tuple(recipes))
        most = 1
        for node in [n for n in exact.nodes if n.op is ops.attention and n.operand("v") is not None]:
            width = sum(v.width for v in node.inputs[1:3] if v is not None)
            most = max(most, width - 2 * len(_choose_pairs(node, self.rotary)))
        replace(self, calibration=None, rank=most).check_keeps(exact, equivalence)


def _choose_pairs(node: Node, rotary: int) -> Array:
    """Return the indices of the rotary pairs of `node` that stay rotated: the rotary/2 of the highest frequencies."""
    k = find_branch(node, "k")
    frequencies = k.rope.operand("frequencies") if isinstance(k, Branch) and k.rope is not None else None
    if frequencies is None:
        return np.arange(0)
    # Computed frequencies fall, as in all papers.
    falling = -np.arange(frequencies.width)
    values = frequencies.recipe.evaluate(node.graph.reader) if isinstance(frequencies, Param) else falling
    return np.sort(np.argsort(-values, kind="stable")[: rotary // 2])

"""Visible keys of attentions: windows, dilated windows and sparse patterns, set as attributes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from weft.ir import Graph, WeftError, ops
from weft.ir.recipes.readers import Array
from weft.ir.schema.visible_keys import Pattern, VisibleKeys
from weft.ir.types.sizes import list_names

from ... import Pass, Trace
from ...analysis.costs import AUDIO_SIZES
from ...analysis.layers import Layers, select_attentions
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.oracle import attend
from ..cache.kv_cache import cap_positions

LONGEST_CHECK = 40  # tokens; passes with a longer range are checked with smaller arguments
Visibility = Callable[[int, int], bool]  # (position of a query, position of a key) -> whether it is visible


def restrict_attentions(graph: Graph, trace: Trace, name: str, layers: Layers, **attrs: Any) -> None:
    """Set the attributes `attrs` on the attentions that `layers` selects; record changes and refusals by pass `name`.
    Attention ops other than `attention` are refused."""
    for node in select_attentions(graph, layers, name):
        if node.op is not ops.attention:
            trace.refuse(name, node.output.name, f"{node.op.name} has neither windows nor patterns")
        elif {**node.attrs, **attrs} != node.attrs:
            node.attrs.update(attrs)
            trace.record_rewrite(name, node.output.name)


def check_masks(before: Graph, after: Graph, equivalence: EquivalenceCheck, visible: Visibility, tokens: int) -> None:
    """Check that attentions whose attributes differ between the graphs see exactly the keys with visible(query, key).

    The graphs run on random sequences of `tokens` tokens; causal attentions also stay causal.

    Raises:
        WeftError: if an output differs.
    """
    old_attrs = {n.output.name: n.attrs for n in before.nodes}
    changed = [n for n in after.nodes if n.op is ops.attention and n.attrs != old_attrs.get(n.output.name)]
    inputs = sample_inputs(before, equivalence, tokens)
    references = {n.output.name: partial(attend, visible) for n in changed}
    equivalence.check_close(equivalence.run_as(before, inputs, references), equivalence.run(after, inputs), EXACT)


def sample_inputs(graph: Graph, equivalence: EquivalenceCheck, tokens: int) -> dict[str, Array]:
    """Return random inputs by name with `tokens` tokens and source tokens, or the model's maximum if that is less."""
    source_tokens = min(tokens, graph.meta.get("max_source_positions") or tokens)
    return equivalence.make_inputs(graph, seq=cap_positions(graph, tokens), source=source_tokens)


def check_minimum(name: str, least: int, **arguments: int) -> None:
    """Raise a WeftError that names the pass `name` if one of `arguments` is below `least`."""
    for argument, value in arguments.items():
        if value < least:
            raise WeftError(f"{name}: {argument}={value} must be at least {least}")


class SlidingWindow(Pass):
    """Restrict every query to the keys less than `size` positions away and the first `keep_first` keys of the sequence.

    Query i sees key j if i − j < size (|i − j| < size if attention is not causal) or j < keep_first. Trained models
    attend to the first tokens whatever their content (attention sinks): if a few stay visible, a sequence may grow far
    beyond the window. Distances are those in the sequence, whereas StreamingLLM uses positions in its cache. `layers`
    selects the layers: all, even, odd, indices ("0-5, 8"), or a pattern ("local*5 + global").

    Condition: nothing changes for sequences of at most `size` tokens. Narrower windows stay as they are, and so do
    sparse patterns.

    Source: Beltagy 2020 (Longformer), arXiv:2004.05150; Xiao 2023 (StreamingLLM), arXiv:2309.17453.

    Example sliding-window{size=3, keep_first=1}::

        graph example {
          input %x: f32[batch, seq, 8]
          param %w: f32[8, 8] = normal([8, 8], std=0.4, stream="w")
          %q: f32[batch, seq, 8] = linear(%x, %w)
          %y: f32[batch, seq, 8] = attention(%q, %x, %x, heads=2, kv_heads=2, causal=true)
          output y = %y
        }
    """

    name = "sliding-window"
    effect = "conditional"
    purpose = "Positions and windows"
    see = ("local-global", "attention-pattern", "rolling-buffer")
    tradeoff = "the cache keeps the first keys in addition to the window"
    size: int
    layers: Layers = "all"
    keep_first: int = 0

    def run(self, graph: Graph, trace: Trace) -> None:
        check_minimum(self.name, 1, size=self.size)
        check_minimum(self.name, 0, keep_first=self.keep_first)
        for node in select_attentions(graph, self.layers, self.name):
            name, window = node.output.name, node.attrs.get("window")
            if node.op is not ops.attention:
                trace.refuse(self.name, name, f"{node.op.name} has no window")
            elif node.attrs["pattern"] != "dense":
                trace.refuse(self.name, name, f"its pattern {node.attrs['pattern']} defines its visible keys")
            elif window is not None and window < self.size:
                trace.refuse(self.name, name, f"its window of {window} keys is narrower")
            elif (window, node.attrs["keep_first"]) != (self.size, self.keep_first):
                node.attrs.update(window=self.size, keep_first=self.keep_first)
                trace.record_rewrite(self.name, name)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that `size` tokens give the same outputs, and queries see `size` keys (size=3 if it is large)."""
        lengths = {node.output.shape[1] for node in select_attentions(before, self.layers, self.name)}
        # The length of audio is chosen in samples, not in the frames that attention sees.
        free_lengths = all(list_names(length).isdisjoint(AUDIO_SIZES) for length in lengths)
        if free_lengths and all(not isinstance(length, int) or length <= self.size for length in lengths):
            inputs = sample_inputs(before, equivalence, min(self.size, LONGEST_CHECK))
            equivalence.check_close(equivalence.run(before, inputs), equivalence.run(after, inputs), EXACT)
        checked = self if self.size + 3 <= LONGEST_CHECK else replace(self, size=3, keep_first=min(self.keep_first, 2))
        after = after if checked is self else checked.apply_to(before)
        size, keep_first = checked.size, checked.keep_first
        check_masks(before, after, equivalence, lambda i, j: abs(i - j) < size or j < keep_first, size + 3)


class Dilate(Pass):
    """Restrict every query to `size` keys with gaps: itself and every `stride`-th key before it.

    Query i sees keys i, i − stride, …, i − (size − 1)·stride (and i + stride, … if attention is not causal): a window
    that reaches `stride` times as far for the same work.

    Condition: the model changes; earlier windows and patterns of the attentions in `layers` are overwritten.

    Source: Beltagy 2020 (Longformer), arXiv:2004.05150.

    Example dilate{size=2, stride=3}, on the graph of sliding-window.
    """

    name = "dilate"
    effect = "changing"
    purpose = "Positions and windows"
    see = ("attention-pattern",)
    tradeoff = "layers whose window was narrower see more keys"
    size: int
    stride: int
    layers: Layers = "all"

    def run(self, graph: Graph, trace: Trace) -> None:
        check_minimum(self.name, 1, size=self.size, stride=self.stride)
        attrs = {"window": self.size * self.stride, "pattern": "dilated", "stride": self.stride}
        restrict_attentions(graph, trace, self.name, self.layers, **attrs, summary=1, keep_first=0)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that queries see the keys of the definition (wide gaps or windows are checked as narrower ones)."""
        checked = self
        if self.size * self.stride + 3 > LONGEST_CHECK:
            checked = replace(self, size=min(self.size, 3), stride=min(self.stride, 4))
            after = checked.apply_to(before)
        distances = [n * checked.stride for n in range(checked.size)]
        check_masks(before, after, equivalence, lambda i, j: abs(i - j) in distances, checked.size * checked.stride + 3)


class AttentionPattern(Pass):
    """Restrict every query to the keys of a sparse pattern.

    Query i sees key j in these cases. `dilated`: i − j is divisible by `stride`. `strided`: |i − j| < stride, or i − j
    is divisible by it. `fixed`: i and j are in one block of `stride` tokens, or j is among the last `summary` of its
    block. `chunked`: i and j are in one block. `dense`: always. In addition, |i − j| < `window` must hold unless it is
    None. The first `keep_first` keys are visible in any case; causal attentions stay causal.

    Condition: the model changes; earlier windows and patterns of the attentions in `layers` are overwritten. Sequences
    of one block give the same outputs if the pattern is chunked or fixed.

    Source: Child 2019 (strided, fixed), arXiv:1904.10509; Beltagy 2020 (dilated), arXiv:2004.05150; Llama 4, 2025
    (chunked); Xiao 2023 (attention sinks), arXiv:2309.17453.

    Example attention-pattern{pattern=fixed, stride=3, layers=even}, on the graph of sliding-window.
    """

    name = "attention-pattern"
    effect = "changing"
    purpose = "Positions and windows"
    see = ("sliding-window", "dilate")
    tradeoff = "layers that had a window may see more keys"
    pattern: Pattern
    stride: int = 1
    summary: int = 1
    window: int | None = None
    keep_first: int = 0
    layers: Layers = "all"

    def run(self, graph: Graph, trace: Trace) -> None:
        check_minimum(self.name, 1, stride=self.stride, summary=self.summary, window=self.window or 1)
        check_minimum(self.name, 0, keep_first=self.keep_first)
        if self.window == 0:
            raise WeftError(f"{self.name}: window=0 must be at least 1")
        if self.pattern == "fixed" and self.summary > self.stride:
            raise WeftError(f"{self.name}: summary={self.summary} exceeds stride={self.stride}, the tokens of a block")
        attrs = {name: getattr(self, name) for name in ("pattern", "stride", "summary", "window")}
        restrict_attentions(graph, trace, self.name, self.layers, **attrs, keep_first=self.keep_first)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that queries see the keys of the definition (wide strides or windows are checked as narrower ones)."""
        checked = self
        if 2 * max(self.stride, self.window or 0) > LONGEST_CHECK:
            stride, window = min(self.stride, 4), self.window and min(self.window, 6)
            checked = replace(self, stride=stride, summary=min(self.summary, stride), window=window)
            after = checked.apply_to(before)
        tokens = 2 * max(checked.stride, checked.window or 0) + 3
        check_masks(before, after, equivalence, checked.is_visible, tokens)

    def is_visible(self, i: int, j: int) -> bool:
        """Return whether query i sees key j by pattern, window and `keep_first`, as if attention were not causal."""
        visible_keys = VisibleKeys(False, self.window, self.keep_first, self.pattern, self.stride, self.summary)
        return bool(visible_keys.mask(np.asarray(i), np.asarray(j)))

"""Visible keys of attentions: windows, dilated windows and sparse patterns, set as attributes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from weft.ir import Graph, WeftError, ops
from weft.ir.recipes.readers import Array
from weft.ir.schema.visible_keys import Pattern, VisibleKeys
from weft.ir.types.sizes import names

from ...analysis.costs import SECOND
from ...analysis.layers import Layers, chosen
from ...core.base import Pass
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.oracle import attend
from ...core.trace import Trace
from ..cache.kv_cache import within_positions

LONGEST_TRIAL = 40  # tokens; what reaches farther is tried with smaller numbers
Sees = Callable[[int, int], bool]  # of the positions of a query and a key


def restrict(graph: Graph, trace: Trace, name: str, layers: Layers, **attrs: Any) -> None:
    """Give the attentions of `layers` the attributes `attrs`."""
    for node in chosen(graph, layers, name):
        if node.op is not ops.attention:
            trace.refuse(name, node.output.name, f"{node.op.name} has neither windows nor patterns")
        elif {**node.attrs, **attrs} != node.attrs:
            node.attrs.update(attrs)
            trace.fired(name, node.output.name)


def check_masks(before: Graph, after: Graph, equivalence: EquivalenceCheck, sees: Sees, tokens: int) -> None:
    """Over texts of `tokens`, attentions whose attributes `after` differ see what `sees` says."""
    old = {n.output.name: n.attrs for n in before.nodes}
    changed = [n for n in after.nodes if n.op is ops.attention and n.attrs != old.get(n.output.name)]
    inputs = texts(before, equivalence, tokens)
    meanings = {n.output.name: partial(attend, sees) for n in changed}
    equivalence.same(equivalence.run_as(before, inputs, meanings), equivalence.run(after, inputs), EXACT)


def texts(graph: Graph, equivalence: EquivalenceCheck, tokens: int) -> dict[str, Array]:
    """Inputs of `tokens` tokens, or as many as there are positions for."""
    source = min(tokens, graph.meta.get("max_source_positions") or tokens)
    return equivalence.inputs(graph, seq=within_positions(graph, tokens), source=source)


def at_least(name: str, least: int, **arguments: int) -> None:
    """Raise WeftError in the name of the pass `name` if an argument is below `least`."""
    for argument, value in arguments.items():
        if value < least:
            raise WeftError(f"{name}: {argument}={value} must be at least {least}")


@dataclass(frozen=True)
class SlidingWindow(Pass):
    """Let every query see only the `size` nearest keys, itself among them, and the first `keep_first` of the text.

    Query i sees key j if i − j < size (|i − j| < size where attention is not causal) or j < keep_first. Trained models
    lean on the first tokens, whatever they say: with a few of them in sight a text may grow far beyond the window.
    Distances stay those of the text, where StreamingLLM counts them in its cache. `layers` says which layers: all,
    even, odd, numbers ("0-5, 8"), or a pattern ("local*5 + global").

    Condition: nothing changes for texts of at most `size` tokens. A window that is narrower already stays as it is, and
    so do sparse patterns.

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
    tradeoff = "the first keys are kept beside those of the window"
    size: int
    layers: Layers = "all"
    keep_first: int = 0

    def run(self, graph: Graph, trace: Trace) -> None:
        at_least(self.name, 1, size=self.size)
        at_least(self.name, 0, keep_first=self.keep_first)
        for node in chosen(graph, self.layers, self.name):
            at, window = node.output.name, node.attrs.get("window")
            if node.op is not ops.attention:
                trace.refuse(self.name, at, f"{node.op.name} has no window")
            elif node.attrs["pattern"] != "dense":
                trace.refuse(self.name, at, f"its pattern {node.attrs['pattern']} says what it sees")
            elif window is not None and window < self.size:
                trace.refuse(self.name, at, f"its window of {window} keys is narrower")
            elif (window, node.attrs["keep_first"]) != (self.size, self.keep_first):
                node.attrs.update(window=self.size, keep_first=self.keep_first)
                trace.fired(self.name, at)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Texts within the window are unchanged; longer texts match the definition (for wide windows, that of
        a window of three)."""
        lengths = {node.output.shape[1] for node in chosen(before, self.layers, self.name)}
        # Of a sound only the samples can be chosen, not the frames that attention sees.
        chosen_lengths = all(names(length).isdisjoint(SECOND) for length in lengths)
        if chosen_lengths and all(not isinstance(length, int) or length <= self.size for length in lengths):
            inputs = texts(before, equivalence, min(self.size, LONGEST_TRIAL))
            equivalence.same(equivalence.run(before, inputs), equivalence.run(after, inputs), EXACT)
        tried = self if self.size + 3 <= LONGEST_TRIAL else replace(self, size=3, keep_first=min(self.keep_first, 2))
        after = after if tried is self else applied_to(before, tried)
        size, keep_first = tried.size, tried.keep_first
        check_masks(before, after, equivalence, lambda i, j: abs(i - j) < size or j < keep_first, size + 3)


@dataclass(frozen=True)
class Dilate(Pass):
    """Let every query see `size` keys with gaps: itself and every `stride`-th before it.

    Query i sees keys i, i − stride, …, i − (size − 1)·stride (and as far ahead where attention is not causal): a window
    that reaches `stride` times as far for the same work.

    Condition: the model becomes another one; what the attentions of `layers` saw before does not count.

    Source: Beltagy 2020 (Longformer), arXiv:2004.05150.

    Example dilate{size=2, stride=3}::

        graph example {
          input %x: f32[batch, seq, 8]
          param %w: f32[8, 8] = normal([8, 8], std=0.4, stream="w")
          %q: f32[batch, seq, 8] = linear(%x, %w)
          %y: f32[batch, seq, 8] = attention(%q, %x, %x, heads=2, kv_heads=2, causal=true)
          output y = %y
        }
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
        at_least(self.name, 1, size=self.size, stride=self.stride)
        seen = {"window": self.size * self.stride, "pattern": "dilated", "stride": self.stride}
        restrict(graph, trace, self.name, self.layers, **seen, summary=1, keep_first=0)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Queries see the keys that the definition lists (with wide gaps or windows, those of narrower ones)."""
        tried = self
        if self.size * self.stride + 3 > LONGEST_TRIAL:
            tried = replace(self, size=min(self.size, 3), stride=min(self.stride, 4))
            after = applied_to(before, tried)
        distances = [n * tried.stride for n in range(tried.size)]
        check_masks(before, after, equivalence, lambda i, j: abs(i - j) in distances, tried.size * tried.stride + 3)


@dataclass(frozen=True)
class AttentionPattern(Pass):
    """Let every query see the keys of a sparse pattern.

    `dilated`: i − j is divisible by `stride`. `strided`: i − j < stride, or divisible by it. `fixed`: key and query are
    in one block of `stride` tokens, or the key is among the last `summary` of its block. `chunked`: they are in one
    block. `dense`: all. Of these keys those that `window` allows (|i − j| < window), and the first `keep_first`
    besides; causal attentions stay causal.

    Condition: the model becomes another one; what the attentions of `layers` saw before does not count. Texts of one
    block keep their numbers if the pattern is chunked or fixed.

    Source: Child 2019 (strided, fixed), arXiv:1904.10509; Beltagy 2020 (dilated), arXiv:2004.05150; Llama 4, 2025
    (chunked); Xiao 2023 (attention sinks), arXiv:2309.17453.

    Example attention-pattern{pattern=fixed, stride=3, layers=even}::

        graph example {
          input %x: f32[batch, seq, 8]
          param %w: f32[8, 8] = normal([8, 8], std=0.4, stream="w")
          %q: f32[batch, seq, 8] = linear(%x, %w)
          %y: f32[batch, seq, 8] = attention(%q, %x, %x, heads=2, kv_heads=2, causal=true)
          output y = %y
        }
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
        at_least(self.name, 1, stride=self.stride, summary=self.summary, window=self.window or 1)
        at_least(self.name, 0, keep_first=self.keep_first)
        if self.window == 0:
            raise WeftError(f"{self.name}: window=0 must be at least 1")
        if self.pattern == "fixed" and self.summary > self.stride:
            raise WeftError(f"{self.name}: summary={self.summary} exceeds the blocks of stride={self.stride}")
        attrs = {name: getattr(self, name) for name in ("pattern", "stride", "summary", "window")}
        restrict(graph, trace, self.name, self.layers, **attrs, keep_first=self.keep_first)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Queries see the keys that the definition lists (with wide strides or windows, those of narrower ones)."""
        tried = self
        if 2 * max(self.stride, self.window or 0) > LONGEST_TRIAL:
            stride, window = min(self.stride, 4), self.window and min(self.window, 6)
            tried = replace(self, stride=stride, summary=min(self.summary, stride), window=window)
            after = applied_to(before, tried)
        tokens = 2 * max(tried.stride, tried.window or 0) + 3
        check_masks(before, after, equivalence, tried.sees, tokens)

    def sees(self, i: int, j: int) -> bool:
        """Return whether query i sees key j, causality aside."""
        seen = VisibleKeys(False, self.window, self.keep_first, self.pattern, self.stride, self.summary)
        return bool(seen.mask(np.asarray(i), np.asarray(j)))


def applied_to(before: Graph, one: Pass) -> Graph:
    """A copy of `before` after the pass `one`."""
    after = before.clone()
    one.run(after, Trace())
    return after

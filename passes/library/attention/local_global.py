"""Layers that see near keys and layers that see all, in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from weft.ir import Graph, Node, WeftError, ops

from ...analysis.layers import roles, self_attentions
from ...analysis.rotary import check_scaling, expected, retune, rotations_of
from ...core.base import Pass
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.oracle import attend
from ...core.trace import Trace
from .windows import LONGEST_TRIAL, applied_to, at_least, texts


@dataclass(frozen=True)
class LocalGlobal(Pass):
    """Let some layers see a window of keys and the others all of them, in a repeating pattern.

    `pattern` says which: "5:1" are five local layers, then a global one, and again; also written "local*5 + global" or
    as a list of the two words. A local query sees the `window` nearest keys, itself among them; a global one sees all.
    `theta_local` and `theta_global` are the bases of their rotary positions (None: as they are). The caches of local
    layers then hold a window (rolling-buffer), so a long text costs what the global layers cost.

    Condition: the model becomes another one, to be trained on. Layers with sparse patterns stay as they are.

    Source: Beltagy 2020 (Longformer), arXiv:2004.05150; Gemma 2, 2024, arXiv:2408.00118; Gemma 3, 2025 (two bases),
    arXiv:2503.19786.

    Example local-global{pattern="1:1", window=2, theta_global=50000}::

        graph example {
          input %x: f32[batch, seq, 8]
          input %position_ids: i64[batch, seq]
          param %frequencies: f32[2] = rope_frequencies(4)
          %q: f32[batch, seq, 8] = rope(%x, %position_ids, %frequencies, heads=2)
          %y: f32[batch, seq, 8] = attention(%q, %q, %x, heads=2, kv_heads=2, causal=true)
          %r: f32[batch, seq, 8] = rope(%y, %position_ids, %frequencies, heads=2)
          %z: f32[batch, seq, 8] = attention(%r, %r, %y, heads=2, kv_heads=2, causal=true)
          output y = %z
        }
    """

    name = "local-global"
    effect = "changing"
    purpose = "Positions and windows"
    see = ("sliding-window",)
    tradeoff = "layers that become global see all keys, also where they had a window"
    window: int
    pattern: str | tuple[str, ...] = "5:1"
    theta_local: float | None = None
    theta_global: float | None = None

    def run(self, graph: Graph, trace: Trace) -> None:
        at_least(self.name, 1, window=self.window)
        layers = self._layers(graph)
        for node, role in layers.items():
            wanted = {"window": self.window if role == "local" else None, "keep_first": 0}
            if node.op is not ops.attention or node.attrs["pattern"] != "dense":
                what = node.attrs.get("pattern", node.op.name)
                trace.refuse(self.name, node.output.name, f"{what} says what it sees")
            elif {**node.attrs, **wanted} != node.attrs:
                node.attrs.update(wanted)
                trace.fired(self.name, node.output.name)
        for same, theta in self._bases(layers):
            for rope, recipe in rotations_of(graph, same, self.name, trace).items():
                rebased = replace(recipe, theta=theta)
                check_scaling(rebased, self.name)
                if recipe != rebased:
                    retune(rope, rebased)
                    trace.fired(self.name, rope.output.name)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Layer for layer the definition: keys nearer than the window or all, and rotations of the base that is said
        (for wide windows, those of a window of three)."""
        tried = self
        if self.window + 3 > LONGEST_TRIAL:
            tried = replace(self, window=3)
            after = applied_to(before, tried)
        window, inputs = tried.window, texts(before, equivalence, tried.window + 3)
        sees = {"local": lambda i, j: abs(i - j) < window, "global": lambda i, j: True}
        known = {n.output.name: n for n in after.nodes}
        meanings: dict[str, Any] = {}
        for node, role in self._layers(before).items():
            if node.op is ops.attention and node.attrs["pattern"] == "dense":
                meanings[node.output.name] = partial(attend, sees[role])
        for layers, theta in self._bases(self._layers(before)):
            for rope, recipe in rotations_of(before, layers, self.name, Trace()).items():
                same = {name: rope.attrs[name] for name in ("interleaved", "amplitude")}
                wanted = replace(recipe, theta=theta)
                meanings[rope.output.name] = expected(wanted, known[rope.output.name], **same)
        equivalence.same(equivalence.run_as(before, inputs, meanings), equivalence.run(after, inputs), EXACT)

    def _layers(self, graph: Graph) -> dict[Node, str]:
        """``local`` or ``global`` for each self-attention."""
        found = self_attentions(graph, self.name)
        try:
            return dict(zip(found, roles(self.pattern, len(found)), strict=True))
        except WeftError as e:
            raise WeftError(f"{self.name}: {e}") from None

    def _bases(self, layers: dict[Node, str]) -> Iterator[tuple[list[Node], float]]:
        """The layers of a role and the base of their rotary positions, where one is said."""
        for role, theta in (("local", self.theta_local), ("global", self.theta_global)):
            if theta is not None:
                yield [n for n in layers if layers[n] == role], theta

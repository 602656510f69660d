"""Layers with local windows that alternate with layers of global attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from weft.ir import Graph, Node, WeftError, ops

from ... import Pass, Trace
from ...analysis.layers import expand_pattern, find_self_attentions
from ...analysis.rotary import check_scaling, find_exclusive_ropes, make_rope_reference, set_frequencies
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.oracle import attend
from .windows import LONGEST_CHECK, check_minimum, sample_inputs


class LocalGlobal(Pass):
    """Restrict the local layers of a repeating pattern to a window of keys; the global layers attend to all keys.

    `pattern` lists the roles: "5:1" means five local layers, then a global one, repeated; also written
    "local*5 + global" or as a list of roles. Query i of a local layer sees the keys j with |i − j| < `window`, and of a
    global layer all keys; causal layers stay causal. `theta_local` and `theta_global` are the RoPE bases of the two
    roles (None: unchanged). With rolling-buffer, the caches of local layers hold only the keys of a window.

    Condition: the model changes and needs training. Sparse patterns keep their keys, shared rotations their base.

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
        check_minimum(self.name, 1, window=self.window)
        layers = self._find_roles(graph)
        for node, role in layers.items():
            new_attrs = {"window": self.window if role == "local" else None, "keep_first": 0}
            if node.op is not ops.attention or node.attrs["pattern"] != "dense":
                kind = node.attrs.get("pattern", node.op.name)
                trace.refuse(self.name, node.output.name, f"{kind} defines its visible keys")
            elif {**node.attrs, **new_attrs} != node.attrs:
                node.attrs.update(new_attrs)
                trace.record_rewrite(self.name, node.output.name)
        for role_layers, theta in self._list_bases(layers):
            for rope, recipe in find_exclusive_ropes(graph, role_layers, self.name, trace).items():
                rebased = replace(recipe, theta=theta)
                check_scaling(rebased, self.name)
                if recipe != rebased:
                    set_frequencies(rope, rebased)
                    trace.record_rewrite(self.name, rope.output.name)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that the queries of every layer see its keys, with its RoPE base (with window=3 if it is large)."""
        checked = self
        if self.window + 3 > LONGEST_CHECK:
            checked = replace(self, window=3)
            after = checked.apply_to(before)
        window, inputs = checked.window, sample_inputs(before, equivalence, checked.window + 3)
        is_visible = {"local": lambda i, j: abs(i - j) < window, "global": lambda i, j: True}
        by_name = {n.output.name: n for n in after.nodes}
        references: dict[str, Any] = {}
        for node, role in self._find_roles(before).items():
            if node.op is ops.attention and node.attrs["pattern"] == "dense":
                references[node.output.name] = partial(attend, is_visible[role])
        for layers, theta in self._list_bases(self._find_roles(before)):
            for rope, recipe in find_exclusive_ropes(before, layers, self.name, Trace()).items():
                same_attrs = {name: rope.attrs[name] for name in ("interleaved", "amplitude")}
                rebased, new = replace(recipe, theta=theta), by_name[rope.output.name]
                references[rope.output.name] = make_rope_reference(rebased, new, **same_attrs)
        equivalence.check_close(equivalence.run_as(before, inputs, references), equivalence.run(after, inputs), EXACT)

    def _find_roles(self, graph: Graph) -> dict[Node, str]:
        """Return the role, ``local`` or ``global``, of each self-attention of `graph`."""
        attentions = find_self_attentions(graph, self.name)
        try:
            return dict(zip(attentions, expand_pattern(self.pattern, len(attentions)), strict=True))
        except WeftError as e:
            raise WeftError(f"{self.name}: {e}") from None

    def _list_bases(self, layers: dict[Node, str]) -> Iterator[tuple[list[Node], float]]:
        """Yield (layers of a role, RoPE base) for each role whose base is not None."""
        for role, theta in (("local", self.theta_local), ("global", self.theta_global)):
            if theta is not None:
                yield [n for n in layers if layers[n] == role], theta

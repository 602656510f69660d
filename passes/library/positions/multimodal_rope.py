"""Rotary positions along three axes, for tokens of images among those of a text."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from weft.ir import Graph, Node, Param, TensorType, Value, WeftError, ops
from weft.ir.recipes import Literal, Scale
from weft.ir.types import dtypes

from ...core.base import Pass
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.trace import Trace
from ...edits.edit import replace_uses

POSITIONS = "rope_positions"
SECTIONS, INTERLEAVED = "rope_sections", "rope_interleaved"  # of graph.meta, where a checkpoint says them
AXES = 3


@dataclass(frozen=True)
class MultimodalRope(Pass):
    """Rotate queries and keys by time, height and width (M-RoPE).

    Adds the input rope_positions i64[batch, seq, 3]. Each pair of a head is turned by the position along one of the
    axes, times its frequency as before: of the pairs the first sections[0] by time, the next sections[1] by height, the
    next sections[2] by width (Qwen2-VL), or `interleaved` the pairs 1, 4, 7, … by height, 2, 5, 8, … by width, as many
    as their sections say, and all others by time (Qwen3-VL). A checkpoint says both. Where an image is, its tokens have
    the time of its start and their rows and columns from there on; a text goes on after the largest number. Caches stay
    in the order of tokens, by position_ids.

    Condition: the three numbers of each token are its position_ids.

    Source: Wang 2024 (Qwen2-VL), arXiv:2409.12191, section 2.1; the interleaved order: Qwen3-VL (2025).

    Example multimodal-rope{sections=[2, 1, 1]}::

        graph example {
          input %x: f32[batch, seq, 8]
          input %position_ids: i64[batch, seq]
          param %f: f32[4] = rope_frequencies(8)
          %q: f32[batch, seq, 8] = rope(%x, %position_ids, %f, heads=1)
          %y: f32[batch, seq, 8] = attention(%q, %q, %x, heads=1, kv_heads=1, causal=true)
          output y = %y
        }
    """

    name = "multimodal-rope"
    effect = "conditional"
    purpose = "Positions and windows"
    see = ("take-embeddings",)
    tradeoff = "three rotations in the place of one"
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    def run(self, graph: Graph, trace: Trace) -> None:
        if POSITIONS in graph.inputs:
            raise WeftError(f"{self.name}: graph {graph.name} has the input {POSITIONS} already")
        at, wanted = graph.inputs.get("position_ids"), self._settings(graph)
        found = [n for n in graph.nodes if n.op is ops.rope and n.inputs[1] is at]
        if at is None or not found:
            raise WeftError(f"{self.name}: nothing in graph {graph.name} is rotated by the input position_ids")
        given = graph.add_input(POSITIONS, TensorType(dtypes.i64, (*at.shape, AXES)))
        with graph.inserting(before=next(iter(graph.nodes))):
            axes = [_along(given, axis) for axis in range(AXES)]
        known = dict[Value, list[Param]]()
        for node in found:
            _turn(node, axes, _frequencies(graph, node, wanted, known))
            trace.fired(self.name, node.output.name)
        if not at.uses:
            del graph.inputs["position_ids"]
            graph.forget(at)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """By three equal numbers everything is turned as by one."""
        inputs = equivalence.inputs(before)
        three = np.stack([inputs["position_ids"]] * AXES, -1)
        given = {name: array for name, array in inputs.items() if name in after.inputs}
        equivalence.same(equivalence.run(before, inputs), equivalence.run(after, {**given, POSITIONS: three}), EXACT)

    def _settings(self, graph: Graph) -> MultimodalRope:
        """The pass with the sections of the checkpoint, unless it has its own."""
        if self.sections:
            return self
        if SECTIONS not in graph.meta:
            raise WeftError(f"{self.name}: say how many pairs turn by time, height and width: sections=[16, 24, 24]")
        return replace(self, sections=tuple(graph.meta[SECTIONS]), interleaved=bool(graph.meta.get(INTERLEAVED)))

    def axes_of(self, pairs: int) -> list[int]:
        """The axis of each of `pairs` pairs of a head.

        Raises:
            WeftError: if the sections are not three numbers of so many pairs together.
        """
        fits = len(self.sections) == AXES and min(self.sections) >= 0 and sum(self.sections) == pairs
        if not fits:
            raise WeftError(f"{self.name}: sections={list(self.sections)} must be three numbers that add up to {pairs}")
        time, height, width = self.sections
        if not self.interleaved:
            return [0] * time + [1] * height + [2] * width
        return [k % 3 if k < 3 * (0, height, width)[k % 3] else 0 for k in range(pairs)]


def _along(positions: Value, axis: int) -> Value:
    """The numbers [batch, seq] along `axis` of `positions` [batch, seq, 3]."""
    one = ops.slice_(positions, axis=2, start=axis, stop=axis + 1, name=f"axis_{axis}")
    return ops.squeeze(one, axes=(2,), name=f"{POSITIONS}_{axis}")


def _frequencies(graph: Graph, node: Node, wanted: MultimodalRope, known: dict[Value, list[Param]]) -> list[Param]:
    """The frequencies of `node` along each axis, 0 for pairs of others."""
    whole = node.required("frequencies")
    if not isinstance(whole, Param):
        raise WeftError(f"{wanted.name}: %{node.output.name} is rotated by computed frequencies")
    if whole not in known:
        chosen = wanted.axes_of(whole.width)
        parts = []
        for axis in range(AXES):
            mask = Literal(tuple(float(a == axis) for a in chosen), (whole.width,))
            name = graph.fresh(f"{whole.name}.{axis}")
            parts.append(graph.add_param(name, whole.type, Scale(whole.recipe, mask)))
        known[whole] = parts
    return known[whole]


def _turn(node: Node, axes: list[Value], frequencies: list[Param]) -> None:
    """Let `node` turn along one axis, and others behind it along the others."""
    graph, amplitude = node.output.graph, node.attrs["amplitude"]
    y = node.required("x")
    with graph.inserting(before=node):
        for at, by in zip(axes, frequencies, strict=True):
            y = ops.rope(y, at, by, **{**node.attrs, "amplitude": amplitude}, name=f"{node.output.name}_{by.name[-1]}")
            amplitude = 1.0
    replace_uses(node.output, y)
    graph.erase(node)

"""Rotary positions along three axes, for sequences with tokens of images and of text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.ir import Graph, Node, Param, TensorType, Value, WeftError, ops
from weft.ir.recipes import Literal, Scale
from weft.ir.types import dtypes

from ... import Pass, Trace
from ...core.equivalence import EXACT, EquivalenceCheck
from ...edits.edit import replace_uses

POSITIONS = "rope_positions"
SECTIONS, INTERLEAVED = "rope_sections", "rope_interleaved"  # keys of graph.meta, set from the checkpoint's config
AXES = 3


class MultimodalRope(Pass):
    """Rotate queries and keys by time, height and width (M-RoPE) instead of by one position.

    The pass adds the input rope_positions i64[batch, seq, 3]. Each pair of a head is rotated by the position along one
    axis, times its frequency as before: the first sections[0] pairs by time, the next sections[1] by height, the next
    sections[2] by width (Qwen2-VL). With `interleaved`, the first sections[1] of the pairs 1, 4, 7, … are rotated by
    height, the first sections[2] of 2, 5, 8, … by width, and all others by time (Qwen3-VL). Without `sections`, both
    settings are those of the checkpoint's config. Tokens of an image have the time of its start, and rows and columns
    counted from there; text continues after the largest position. Caches order tokens by position_ids; this input is
    removed if nothing reads it.

    Condition: the three positions of each token equal its position_ids.

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
    tradeoff = "three rotations instead of one"
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    def run(self, graph: Graph, trace: Trace) -> None:
        if POSITIONS in graph.inputs:
            raise WeftError(f"{self.name}: graph {graph.name} already has the input {POSITIONS}")
        position_ids, settings = graph.inputs.get("position_ids"), self._resolve_settings(graph)
        ropes = [n for n in graph.nodes if n.op is ops.rope and n.inputs[1] is position_ids]
        if position_ids is None or not ropes:
            raise WeftError(f"{self.name}: nothing in graph {graph.name} is rotated by the input position_ids")
        rope_positions = graph.add_input(POSITIONS, TensorType(dtypes.i64, (*position_ids.shape, AXES)))
        with graph.inserting(before=next(iter(graph.nodes))):
            axes = [_select_axis(rope_positions, axis) for axis in range(AXES)]
        cache = dict[Value, list[Param]]()
        for node in ropes:
            _rotate_by_axes(node, axes, _split_by_axis(graph, node, settings, cache))
            trace.record_rewrite(self.name, node.output.name)
        if not position_ids.uses:
            del graph.inputs["position_ids"]
            graph.release_name(position_ids)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that three equal positions give the same outputs as the one position."""
        inputs = equivalence.make_inputs(before)
        positions = np.stack([inputs["position_ids"]] * AXES, -1)
        feeds = {name: array for name, array in inputs.items() if name in after.inputs} | {POSITIONS: positions}
        equivalence.check_close(equivalence.run(before, inputs), equivalence.run(after, feeds), EXACT)

    def _resolve_settings(self, graph: Graph) -> MultimodalRope:
        if self.sections:
            return self
        if SECTIONS not in graph.meta:
            raise WeftError(
                f"{self.name}: sections= is missing: give the pairs for time, height and width, as in [16, 24, 24]"
            )
        return replace(self, sections=tuple(graph.meta[SECTIONS]), interleaved=bool(graph.meta.get(INTERLEAVED)))

    def assign_axes(self, pairs: int) -> list[int]:
        """Return the axis (0 time, 1 height, 2 width) of each of the `pairs` rotary pairs of a head.

        Raises:
            WeftError: if the sections are not three counts that add up to `pairs`.
        """
        fits = len(self.sections) == AXES and min(self.sections) >= 0 and sum(self.sections) == pairs
        if not fits:
            raise WeftError(f"{self.name}: sections={list(self.sections)} must be three numbers that add up to {pairs}")
        time, height, width = self.sections
        if not self.interleaved:
            return [0] * time + [1] * height + [2] * width
        return [k % 3 if k < 3 * (0, height, width)[k % 3] else 0 for k in range(pairs)]


def _select_axis(positions: Value, axis: int) -> Value:
    column = ops.slice_(positions, axis=2, start=axis, stop=axis + 1, name=f"axis_{axis}")
    return ops.squeeze(column, axes=(2,), name=f"{POSITIONS}_{axis}")


def _split_by_axis(graph: Graph, node: Node, settings: MultimodalRope, cache: dict[Value, list[Param]]) -> list[Param]:
    """Return one frequency parameter per axis for the rope `node`, zero at pairs of other axes.
    `cache` maps frequencies to these parameters, so that ropes share them."""
    all_pairs = node.required_operand("frequencies")
    if not isinstance(all_pairs, Param):
        raise WeftError(f"{settings.name}: %{node.output.name} is rotated by computed frequencies")
    if all_pairs not in cache:
        axis_of_pair = settings.assign_axes(all_pairs.width)
        by_axis = []
        for axis in range(AXES):
            mask = Literal(tuple(float(a == axis) for a in axis_of_pair), (all_pairs.width,))
            name = graph.reserve_name(f"{all_pairs.name}.{axis}")
            by_axis.append(graph.add_param(name, all_pairs.type, Scale(all_pairs.recipe, mask)))
        cache[all_pairs] = by_axis
    return cache[all_pairs]


def _rotate_by_axes(node: Node, axes: list[Value], frequencies: list[Param]) -> None:
    """Replace the rope `node` by one rope per axis, in sequence; rope i reads the positions axes[i], frequencies[i]."""
    graph, amplitude = node.output.graph, node.attrs["amplitude"]
    y = node.required_operand("x")
    with graph.inserting(before=node):
        for at, f in zip(axes, frequencies, strict=True):
            y = ops.rope(y, at, f, **{**node.attrs, "amplitude": amplitude}, name=f"{node.output.name}_{f.name[-1]}")
            amplitude = 1.0
    replace_uses(node.output, y)
    graph.erase(node)

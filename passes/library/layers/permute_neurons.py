"""Permute the hidden features of feed-forwards."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from weft.ir import Graph, Node, Param, Recipe, WeftError, ops
from weft.ir.recipes import Shuffle

from ... import Pass, Trace
from ...analysis.feed_forward import match_feed_forward
from ...edits.edit import derive_param, replace_param

ShuffledRange = tuple[int, int, int, int]  # axis, start and stop, seed
RangesByUse = dict[tuple[Node, int], tuple[ShuffledRange, ...]]  # (node, index of an operand) -> runs of that operand


class PermuteNeurons(Pass):
    """Permute the hidden features of every feed-forward, and of all experts, into a random order drawn from `seed`.

    For a permutation P, down Pᵀ a(P up x) = down a(up x), since the activation a is elementwise; gates and biases are
    permuted like up. Because of this symmetry, very different weights are the same model. The pass helps to test code
    that must not depend on the order.

    Condition: all readers of the weights are feed-forwards that use them in the same role. Weights that an earlier run
    has put into this order stay.

    Source: Hecht-Nielsen 1990; Git Re-Basin (Ainsworth 2022, 2209.04836).

    Example permute-neurons::

        graph example {
          input %x: f32[batch, seq, 4]
          param %up.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="up")
          param %down.weight: f32[4, 6] = normal([4, 6], std=0.5, stream="down")
          %up: f32[batch, seq, 6] = linear(%x, %up.weight)
          %relu: f32[batch, seq, 6] = relu(%up)
          %down: f32[batch, seq, 4] = linear(%relu, %down.weight)
          output y = %down
        }
    """

    name = "permute-neurons"
    effect = "exact"
    purpose = "Same function, other weights"
    seed: int = 0

    def run(self, graph: Graph, trace: Trace) -> None:
        if self.seed < 0:
            raise WeftError(f"{self.name}: seed={self.seed} is negative")
        sites = [(node, ranges) for node in graph.nodes if (ranges := self._find_ranges(node))]
        ranges_by_use = {use: shuffled_range for _, ranges in sites for use, shuffled_range in ranges.items()}
        for site, ranges in sites:
            params = {use: p for use in ranges if isinstance(p := use[0].inputs[use[1]], Param)}
            users = [n for use, p in params.items() for n, i in p.uses if ranges_by_use.get((n, i)) != ranges[use]]
            if users or len(params) < len(ranges):
                reason = f"also read by {users[0].op.name} (%{users[0].output.name})" if users else "computed"
                trace.refuse(self.name, site.output.name, f"its weights are {reason}")
                continue
            if all(_is_shuffled(p.recipe, ranges[use]) for use, p in params.items()):
                continue  # in this order already
            trace.record_rewrite(self.name, site.output.name)
            for (node, i), old in params.items():
                recipe = old.recipe
                for shuffled_range in ranges[node, i]:
                    recipe = Shuffle(recipe, *shuffled_range)
                new = derive_param(old, recipe)
                node.set_input(i, new)
                replace_param(old, new)

    def _find_ranges(self, node: Node) -> RangesByUse | None:
        """Return the axis ranges to shuffle, keyed by (node, operand index), of the feed-forward that `node` ends. A
        moe is a whole feed-forward. Return None for nodes that end no feed-forward."""
        if node.op is ops.moe:
            up, down = node.required_operand("up"), node.required_operand("down")
            seed, count = self._derive_seed(down.name), int(up.shape[1])
            axes = {"up": 1, "gate": 1, "up_bias": 1, "gate_bias": 1, "down": 2}
            axis_by_index = {node.op.operand_index(k): axis for k, axis in axes.items() if node.operand(k) is not None}
            return {(node, i): ((axis, 0, count, seed),) for i, axis in axis_by_index.items()}
        unit = match_feed_forward(node)
        if unit is None or isinstance(unit, str):
            return None
        # Seeded by the name of down: feed-forwards that share weights get the same order.
        seed = self._derive_seed(unit.out.params[0].name)
        ranges: RangesByUse = {(node, 1): ((1, 0, unit.hidden, seed),)}
        for part in (unit.up, unit.gate):
            for i, param in enumerate(() if part is None else part.params, 1):
                if part is not None and param is not None:
                    ranges[part.node, i] = (*ranges.get((part.node, i), ()), (0, part.start, part.stop, seed))
        return ranges

    def _derive_seed(self, name: str) -> int:
        # crc32, because hash() of a string differs between processes.
        return zlib.crc32(f"{self.seed} {name}".encode())


def _is_shuffled(recipe: Recipe, ranges: Sequence[ShuffledRange]) -> bool:
    for shuffled_range in reversed(ranges):
        if not isinstance(recipe, Shuffle) or (recipe.axis, recipe.start, recipe.stop, recipe.seed) != shuffled_range:
            return False
        recipe = recipe.item
    return True

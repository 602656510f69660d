"""The hidden numbers of feed-forwards in another order."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Recipe, WeftError, ops
from weft.ir.recipes import Shuffle

from ...analysis.feed_forward import feed_forward
from ...core.base import Pass
from ...core.trace import Trace
from ...edits.edit import derive, replace_param

Run = tuple[int, int, int, int]  # axis, start and stop, seed
Runs = dict[tuple[Node, int], tuple[Run, ...]]  # of operands of nodes


@dataclass(frozen=True)
class PermuteNeurons(Pass):
    """Put the neurons of every feed-forward, and of all experts, into a random order drawn from `seed`.

    For a permutation P, down Pᵀ a(P up x) = down a(up x), since the activation works element by element; gates and
    biases follow up. It is a symmetry by which very different weights are the same model: a test of whatever must not
    depend on the order, and the step that lets models be compared and merged.

    Condition: all readers of the weights are feed-forwards in which they have the same part. Weights in this very order
    already stay.

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
        sites = [(node, runs) for node in graph.nodes if (runs := self._runs(node))]
        wanted = {use: run for _, runs in sites for use, run in runs.items()}
        for site, runs in sites:
            params = {use: p for use in runs if isinstance(p := use[0].inputs[use[1]], Param)}
            others = [n for use, p in params.items() for n, i in p.uses if wanted.get((n, i)) != runs[use]]
            if others or len(params) < len(runs):
                why = f"read by {others[0].op.name} (%{others[0].output.name}) too" if others else "computed"
                trace.refuse(self.name, site.output.name, f"its weights are {why}")
                continue
            if all(_is_shuffled(p.recipe, runs[use]) for use, p in params.items()):
                continue  # in this order already
            trace.fired(self.name, site.output.name)
            for (node, i), old in params.items():
                new = derive(old, _shuffled(old.recipe, runs[node, i]))
                node.set_input(i, new)
                replace_param(old, new)

    def _runs(self, node: Node) -> Runs | None:
        """Return the runs of neurons to shuffle for the feed-forward or experts that end in `node`; None if it ends
        none."""
        if node.op is ops.moe:
            up, down = node.operand("up"), node.operand("down")
            assert up is not None and down is not None
            seed, count = self._seed(down.name), int(up.shape[1])
            axes = {"up": 1, "gate": 1, "up_bias": 1, "gate_bias": 1, "down": 2}
            given = {node.op.operand_index(k): axis for k, axis in axes.items() if node.operand(k) is not None}
            return {(node, i): ((axis, 0, count, seed),) for i, axis in given.items()}
        found = feed_forward(node)
        if found is None or isinstance(found, str):
            return None
        # Seeded by the name of down: feed-forwards that share weights get the same order.
        seed = self._seed(found.out.params[0].name)
        runs: Runs = {(node, 1): ((1, 0, found.hidden, seed),)}
        for side in (found.up, found.gate):
            for i, param in enumerate(() if side is None else side.params, 1):
                if side is not None and param is not None:
                    runs[side.node, i] = (*runs.get((side.node, i), ()), (0, side.start, side.stop, seed))
        return runs

    def _seed(self, name: str) -> int:
        # crc32, as hash() of text differs from process to process.
        return zlib.crc32(f"{self.seed} {name}".encode())


def _is_shuffled(recipe: Recipe, runs: Sequence[Run]) -> bool:
    """Return whether `recipe` already has all `runs`."""
    for run in reversed(runs):
        if not isinstance(recipe, Shuffle) or (recipe.axis, recipe.start, recipe.stop, recipe.seed) != run:
            return False
        recipe = recipe.item
    return True


def _shuffled(recipe: Recipe, runs: Sequence[Run]) -> Recipe:
    """`recipe` with all `runs` in their order."""
    for axis, start, stop, seed in runs:
        recipe = Shuffle(recipe, axis, start, stop, seed)
    return recipe

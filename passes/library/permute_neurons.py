"""The hidden numbers of feed-forwards in another order."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from weft.ir import Graph, Node, Param, WeftError
from weft.ir.recipes import Take

from ..base import Pass
from ..edit import derive, supersede
from ..feed_forward import feed_forward
from ..trace import Trace

Orders = dict[tuple[Node, int], tuple[int, tuple[int, ...]]]  # operands of nodes: an axis, and its indices in order


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
    seed: int = 0

    def run(self, graph: Graph, trace: Trace) -> None:
        if self.seed < 0:
            raise WeftError(f"{self.name}: seed={self.seed} is negative")
        sites = [(node, orders) for node in graph.nodes if (orders := self._orders(node))]
        wanted = {use: order for _, orders in sites for use, order in orders.items()}
        for site, orders in sites:
            params = {use: p for use in orders if isinstance(p := use[0].inputs[use[1]], Param)}
            others = [n for use, p in params.items() for n, i in p.uses if wanted.get((n, i)) != orders[use]]
            if others or len(params) < len(orders):
                why = f"read by {others[0].op.name} (%{others[0].output.name}) too" if others else "computed"
                trace.refuse(self.name, site.output.name, f"its weights are {why}")
            elif any(not _ordered(p, *orders[use]) for use, p in params.items()):
                trace.fired(self.name, site.output.name)
                for (node, i), old in params.items():
                    axis, indices = orders[node, i]
                    new = derive(old, Take(old.recipe, indices, axis))
                    node.set_input(i, new)
                    supersede(old, new)

    def _orders(self, node: Node) -> Orders | None:
        """What the feed-forward, or the experts, that end in `node` have to reorder; None if `node` ends none."""
        if node.op.name == "moe":
            up, down = node.operand("up"), node.operand("down")
            assert up is not None and down is not None
            order = self._drawn(down.name, up.shape[1])
            axes = {"up": 1, "gate": 1, "up_bias": 1, "gate_bias": 1, "down": 2}
            return {(node, node.op.operand_index(k)): (axis, order) for k, axis in axes.items() if node.operand(k)}
        found = feed_forward(node)
        if found is None or isinstance(found, str):
            return None
        order = self._drawn(found.out.params[0].name, found.hidden)
        orders: Orders = {(node, 1): (1, order)}
        for side in (found.up, found.gate):
            for i, param in enumerate(() if side is None else side.params, 1):
                if side is not None and param is not None:
                    whole = list(orders.get((side.node, i), (0, range(param.shape[0])))[1])
                    whole[side.start : side.stop] = [side.start + j for j in order]
                    orders[side.node, i] = 0, tuple(whole)
        return orders

    def _drawn(self, name: str, count: int) -> tuple[int, ...]:
        drawn = np.random.default_rng((self.seed, zlib.crc32(name.encode()))).permutation(count)
        return tuple(drawn.tolist())


def _ordered(param: Param, axis: int, indices: tuple[int, ...]) -> bool:
    """Whether `param` was put into this order before."""
    recipe = param.recipe
    return isinstance(recipe, Take) and (recipe.axis, recipe.indices) == (axis, indices)

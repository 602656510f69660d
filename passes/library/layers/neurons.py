"""Prune or permute the hidden features of feed-forwards."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from weft.ir import Graph, Node, Param, Recipe, WeftError, ops
from weft.ir.recipes import Literal, Scale, Shuffle, Source, Take
from weft.ir.recipes.readers import Array, SpilledTensors

from ... import Pass, Trace
from ...analysis.feed_forward import FeedForward, match_feed_forward
from ...core.equivalence import EquivalenceCheck
from ...edits.edit import derive_param, rebuild_node, replace_param, replace_weights, set_recipe
from ...fitting.calibration import Activations, read_tokens

CAUTION = 5.0  # strength of the ridge: tokens, per remaining feature, that count as much as the old weight


class PruneNeurons(Pass):
    """Keep the share `keep` of the hidden features of every feed-forward that contribute most to its output.

    A contribution is the energy E[h_i²]·‖down_i‖² of a feature h_i on `tokens` tokens of a `calibration` file (text, or
    token ids as .npy or .json). The down projection is then refitted to the output before by least squares on these
    tokens, with a ridge. Without a file a contribution is ‖up_i‖²·‖down_i‖², and nothing is refitted.

    Condition: up, gate and down are linears of their own (`unpack` splits packed ones), which nothing else reads. The
    result is exact if the removed features are zero.

    Source: McCarley 2019 (arXiv 1910.06360); least squares as in Optimal Brain Surgeon (Hassibi 1993).

    Example prune-neurons{keep=0.5}, on the graph of upcycle-to-moe.
    """

    name = "prune-neurons"
    effect = "lossy"
    purpose = "Convert heads, cut heads and layers"
    see = ("prune-heads", "prune-layers")
    idempotent: ClassVar[bool] = False
    keep: float = 0.75
    calibration: str | None = None
    tokens: int = 8192

    def run(self, graph: Graph, trace: Trace) -> None:
        if not 0 < self.keep < 1 or self.tokens < 1:
            raise WeftError(f"{self.name}: keep={self.keep} must be between 0 and 1, and tokens={self.tokens} positive")
        units = []
        for node in list(graph.nodes):
            unit = "its features belong to experts" if node.op is ops.moe else match_feed_forward(node)
            reason = unit if isinstance(unit, str) else None if unit is None else _find_obstacle(unit)
            if unit is not None:
                trace.record_result(self.name, node.output.name, reason)
            if isinstance(unit, FeedForward) and reason is None:
                units.append(unit)
        graph.reader = reader = SpilledTensors(graph.reader)
        texts = read_tokens(graph, self.calibration, self.tokens) if self.calibration and units else ()
        activations = Activations(graph.clone(), texts) if texts else None
        for unit in units:
            _prune(unit, max(1, round(self.keep * unit.hidden)), activations, reader)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that outputs do not change if the removed features are zero."""
        silenced = equivalence.randomize_weights(before)
        for node in silenced.nodes:
            unit = match_feed_forward(node)
            if isinstance(unit, FeedForward) and _find_obstacle(unit) is None:
                count = max(1, round(self.keep * unit.hidden))
                rows = np.random.default_rng(0).permutation(unit.hidden) < count
                down = unit.out.params[0]
                down.recipe = Scale(down.recipe, Literal.from_array(rows.astype(float)), axis=1)
        replace(self, calibration=None).check_keeps(silenced, equivalence)


def _find_obstacle(unit: FeedForward) -> str | None:
    """Return a reason (str) why features of `unit` cannot be removed; None if they can."""
    if any(part.is_packed for part in unit.parts):
        return "its projections are packed: run unpack before"
    shared = next((p for p in unit.params if {*p.users} - {part.node for part in unit.parts}), None)
    return None if shared is None else f"its weight {shared.name} is also read elsewhere"


def _prune(unit: FeedForward, count: int, activations: Activations | None, reader: SpilledTensors) -> None:
    """Keep `count` hidden features of `unit`."""
    old = unit.out.params[0]
    down = old.recipe.evaluate(reader).astype(np.float64)
    moment, tokens = _compute_moment(unit, activations, reader)
    energies = np.diagonal(moment) * (down**2).sum(0)
    # A stable sort: among features with equal energy the first stay, on every machine.
    remaining = tuple(sorted(np.argsort(-energies, kind="stable")[:count].tolist()))
    recipe: Recipe = Take(old.recipe, remaining, axis=1)
    if tokens:
        rows, gram = down[:, remaining], moment[np.ix_(remaining, remaining)]
        missed = down @ moment[:, remaining] - rows @ gram
        ridge = CAUTION / tokens * (np.trace(gram) or 1.0) * np.eye(count)
        key = reader.unique_key(old.name)
        reader.put(key, (rows + np.linalg.solve(gram + ridge, missed.T).T).astype(old.recipe.read(reader, 0, 1).dtype))
        recipe = Source(key)
    for part in unit.parts[:-1]:
        weight, bias = part.params
        replace_weights(
            part.node, Take(weight.recipe, remaining), "same" if bias is None else Take(bias.recipe, remaining), count
        )
    for node in reversed(unit.nodes):
        rebuild_node(node)
    new = derive_param(old, recipe, (int(old.shape[0]), count))
    rebuild_node(unit.down, {"weight": new})
    replace_param(old, new)


def _compute_moment(unit: FeedForward, activations: Activations | None, reader: SpilledTensors) -> tuple[Array, int]:
    """Return (Σ h hᵀ over tokens, number of tokens) of the hidden features h; without activations ‖up_i‖² and 0."""
    if activations is None:
        norms = (unit.up.weight.evaluate(reader).astype(np.float64) ** 2).sum(1)
        return np.diag(norms), 0
    total, tokens = np.zeros((unit.hidden, unit.hidden)), 0
    for h in activations(unit.down.required_operand("x")):
        h = h.reshape(-1, unit.hidden).astype(np.float64)
        total += h.T @ h
        tokens += len(h)
    return total, tokens


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

    Example permute-neurons, on the graph of upcycle-to-moe.
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
                set_recipe(node, i, recipe)

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

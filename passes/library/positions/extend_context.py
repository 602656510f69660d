"""Extend the context of a model by scaled RoPE frequencies or an interpolated position table."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from weft.ir import Graph, Node, Recipe, WeftError, ops
from weft.ir.recipes import Concat, Slice
from weft.ir.recipes.frequencies import Interpolate, RopeFrequencies, Sinusoid
from weft.ir.recipes.readers import Array

from ... import Pass, Trace
from ...analysis.layers import Layers, select_attentions
from ...analysis.rotary import (
    MAX_FACTOR,
    ScalingArguments,
    check_scaling,
    find_exclusive_ropes,
    get_frequencies,
    make_rope_reference,
    set_frequencies,
)
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.oracle import compute_amplitude
from ...edits.edit import require_param, set_recipe
from .strip_positions import find_first_row, find_position_tables

_SCALING = {"pi": "linear", "ntk": "ntk", "yarn": "yarn", "llama3": "llama3"}
_LENGTHS = ("context", "max_positions", "source_context", "max_source_positions")


class ExtendContext(ScalingArguments, Pass):
    """Extend the context of a model `factor` times by scaling its RoPE frequencies or interpolating its position table.

    RoPE rotates pair k by position · f_k, with f_k = θ^(−2k/d). `method` selects the new frequencies:

    - pi: f_k/factor, as if positions were compressed into the old context. A learned position table grows `factor`-fold
      by rows interpolated between the old ones; a table of sinusoids gets exact rows.
    - ntk: the base becomes θ·factor^(d/(d−2)): the fastest pair keeps its frequency and the slowest is interpolated.
    - yarn: rotary pairs with more than `beta_fast` rotations over the `original` context keep their frequencies, those
      with fewer than `beta_slow` are interpolated (f_k/factor), and those between are blended (the bounds are rounded
      to whole pairs if `truncate`). Rotated queries and keys are scaled by 0.1·ln(factor) + 1.
    - llama3: as yarn, with the bounds `high_freq` and `low_freq` and without the scale.

    `original` None means the model's context. graph.meta stores the new lengths. `layers` selects the layers whose
    rotations change: all, even, odd, indices, or a pattern ("local*5 + global"); position tables change only with all.

    Condition: the model changes; it is usable directly (ntk, yarn) or after little training. Frequencies that are
    already scaled do not change, and neither do biases by distance; position tables only support pi. It is an error if
    the graph has no positions that the pass extends.

    Source: Chen 2023 (pi), arXiv:2306.15595; bloc97 2023 (NTK-aware scaled RoPE); Peng 2023 (YaRN), arXiv:2309.00071;
    Llama 3, 2024, arXiv:2407.21783.

    Example extend-context{method=pi, factor=2}, on the graph of multimodal-rope.
    """

    name = "extend-context"
    effect = "changing"
    purpose = "Positions and windows"
    see = ("insert-rope",)
    method: Literal["pi", "ntk", "yarn", "llama3"]
    factor: float
    layers: Layers = "all"

    def run(self, graph: Graph, trace: Trace) -> None:
        if not 1 <= self.factor <= MAX_FACTOR:
            raise WeftError(f"{self.name}: factor={self.factor} must be from 1 to {MAX_FACTOR:g}")
        original = self.find_context(graph)
        ropes = find_exclusive_ropes(graph, select_attentions(graph, self.layers, self.name), self.name, trace)
        tables = find_position_tables(graph) if self.layers == "all" else []
        applied = [self._scale_frequencies(rope, recipe, original, trace) for rope, recipe in ropes.items()]
        applied += [self._lengthen_table(node, trace) for node in tables]
        if not any(applied):
            why = f"%{trace.refusals[0].at}: {trace.refusals[0].reason}" if trace.refusals else "no rotations, no table"
            raise WeftError(f"{self.name}: graph {graph.name} has no positions to extend ({why})")
        if trace.rewrites[self.name]:
            self._update_meta(graph, original)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that RoPE uses the paper's frequencies (in complex arithmetic) and tables have interpolated rows."""
        by_name = {n.output.name: n for n in after.nodes}
        references: dict[str, Any] = {}
        tables = find_position_tables(before)
        for node in before.nodes:
            name, new = node.output.name, by_name[node.output.name]
            old = get_frequencies(node) if node.op is ops.rope else None
            if old is not None and old != get_frequencies(new):
                settings = {key: node.attrs[key] for key in ("interleaved", "amplitude")}
                if self.method == "yarn":
                    settings["amplitude"] = compute_amplitude("yarn", self.factor)
                scaled = self._scale_recipe(old, self.find_context(before))
                references[name] = make_rope_reference(scaled, new, **settings)
            elif node in tables and require_param(new, "table").shape != require_param(node, "table").shape:
                staged = equivalence.randomize_weights(before), equivalence.randomize_weights(after)
                references[name] = partial(_look_up_rows, self._expect_table(node, *staged))
        inputs = equivalence.make_inputs(after)
        equivalence.check_close(equivalence.run_as(before, inputs, references), equivalence.run(after, inputs), EXACT)

    def _scale_recipe(self, recipe: RopeFrequencies, original: int) -> RopeFrequencies:
        return self.scale_recipe(recipe, _SCALING[self.method], self.factor, original)

    def _scale_frequencies(self, rope: Node, old: RopeFrequencies, original: int, trace: Trace) -> bool:
        """Scale the frequencies `old` of the node `rope`; return False after a refusal, else True."""
        if old.scaling != "none":
            if (old.scaling, old.factor) == (_SCALING[self.method], self.factor):
                return True
            why = f"its frequencies are already scaled ({old.scaling}, factor {old.factor:g})"
            trace.refuse(self.name, rope.output.name, why)
            return False
        recipe = self._scale_recipe(old, original)
        check_scaling(recipe, self.name)
        set_frequencies(rope, recipe, recipe.attention_factor() if self.method == "yarn" else None)
        trace.record_rewrite(self.name, rope.output.name)
        return True

    def _lengthen_table(self, node: Node, trace: Trace) -> bool:
        """Lengthen the table of the position embedding `node`; return False after a refusal, else True."""
        table, offset = require_param(node, "table"), find_first_row(node)
        factors = [r.factor for r in (table.recipe, *table.recipe.parts) if isinstance(r, Interpolate | Sinusoid)]
        factor = max(factors, default=1.0)
        # An earlier run has interpolated the table: neither a rewrite nor a refusal.
        if factor == self.factor:
            return True
        if offset is None:
            trace.refuse(self.name, node.output.name, f"the row of %{table.name} for position 0 is unknown")
            return False
        if factor != 1 or self.method != "pi":
            stretched = f"positions of the table %{table.name} are already interpolated, factor {factor:g}"
            unsupported = "a table of positions can only be interpolated: method=pi"
            trace.refuse(self.name, node.output.name, unsupported if factor == 1 else stretched)
            return False
        rows, width = table.shape
        length = int((rows - offset) * self.factor)
        new: Recipe
        if isinstance(table.recipe, Sinusoid) and not offset:
            new = replace(table.recipe, length=length, factor=self.factor)
        elif offset:
            # Rows before position 0 encode no position (OPT has two such rows) and stay.
            head, tail = (Slice(table.recipe, 0, *ends) for ends in ((0, offset), (offset, rows)))
            new = Concat((head, Interpolate(tail, length, self.factor)))
        else:
            new = Interpolate(table.recipe, length, self.factor)
        set_recipe(node, 1, new, (offset + length, width))
        trace.record_rewrite(self.name, node.output.name)
        return True

    def _update_meta(self, graph: Graph, original: int) -> None:
        for key in _LENGTHS:
            if graph.meta.get(key):
                graph.meta[key] = int(graph.meta[key] * self.factor)
        if self.original is not None:
            graph.meta["context"] = int(original * self.factor)

    def _expect_table(self, node: Node, before: Graph, after: Graph) -> Array:
        """Return the float64 table that `after` should have for the position embedding `node` of the graph `before`.
        Raise a WeftError if a table of sinusoids in `after` differs from sinusoids at interpolated positions."""
        old = before.params[require_param(node, "table").name]
        new_node = next(n for n in after.nodes if n.output.name == node.output.name)
        values = require_param(new_node, "table").recipe.evaluate(after.reader).astype(np.float64)
        offset = find_first_row(node) or 0
        at = np.arange(len(values) - offset) / self.factor
        if isinstance(old.recipe, Sinusoid) and not offset:
            angle = at[:, None] / old.recipe.base ** (2 * np.arange(old.recipe.dim // 2) / old.recipe.dim)
            waves = np.sin(angle), np.cos(angle)
            expected = np.dstack(waves).reshape(len(at), -1) if old.recipe.interleaved else np.hstack(waves)
            if np.max(np.abs(expected - values)) > 1e-6:
                raise WeftError(f"table %{old.name} must contain sinusoids at interpolated positions, but does not")
            return values
        rows = old.recipe.evaluate(before.reader).astype(np.float64)
        columns = [np.interp(at, np.arange(len(rows) - offset), column) for column in rows[offset:].T]
        return np.concatenate([rows[:offset], np.stack(columns, 1)])


def _look_up_rows(table: Array, ids: Array, _: Array) -> Array:
    return np.asarray(table[ids])

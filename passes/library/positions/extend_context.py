"""Longer texts than the model was trained on, by other frequencies or a stretched table of positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from weft.ir import Graph, Node, Param, Recipe, WeftError, ops
from weft.ir.recipes import Concat, Slice
from weft.ir.recipes.frequencies import Interpolate, RopeFrequencies, Sinusoid
from weft.ir.recipes.readers import Array

from ...analysis.layers import Layers, chosen
from ...analysis.rotary import FARTHEST, ScalingArguments, check_scaling, expected, recipe_of, retune, rotations_of
from ...core.base import Pass
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.oracle import temperature
from ...core.trace import Trace
from ...edits.edit import derive, replace_param
from .position_values import first_row, position_tables

_SCALING = {"pi": "linear", "ntk": "ntk", "yarn": "yarn", "llama3": "llama3"}
_LENGTHS = ("context", "max_positions", "source_context", "max_source_positions")


@dataclass(frozen=True)
class ExtendContext(ScalingArguments, Pass):
    """Let the positions of a model reach `factor` times as far.

    RoPE turns pair k by position · f_k, f_k = θ^(−2k/d). `pi`: f_k/factor, as if positions were squeezed into the old
    context; a learned table of positions gets `factor` times as many rows, interpolated between the old ones, a table
    of sinusoids exact ones. `ntk`: the base becomes θ·factor^(d/(d−2)), so that fast pairs stay and the slowest is
    interpolated. `yarn`: rotary pairs with more than `beta_fast` rotations over the `original` context stay, those with
    fewer than `beta_slow` are interpolated, those between are blended (bounds are whole pairs if `truncate`), and
    rotated queries and keys are scaled by 0.1·ln(factor) + 1. `llama3`: the same with `low_freq` and `high_freq`.
    `original` None is the model's context; graph.meta then says the new one. `layers` says which layers' rotations:
    all, even, odd, numbers, or a pattern ("local*5 + global").

    Condition: the model becomes another one, usable as it is (ntk, yarn) or after little training. Frequencies that are
    scaled already stay as they are, and so do biases by distance; tables only know pi.

    Source: Chen 2023 (pi), arXiv:2306.15595; bloc97 2023 (NTK-aware scaled RoPE); Peng 2023 (YaRN), arXiv:2309.00071;
    Llama 3, 2024, arXiv:2407.21783.

    Example extend-context{method=pi, factor=2}::

        graph example {
          input %x: f32[batch, seq, 8]
          input %position_ids: i64[batch, seq]
          param %frequencies: f32[2] = rope_frequencies(4)
          %q: f32[batch, seq, 8] = rope(%x, %position_ids, %frequencies, heads=2)
          %y: f32[batch, seq, 8] = attention(%q, %q, %x, heads=2, kv_heads=2, causal=true)
          output y = %y
        }
    """

    name = "extend-context"
    effect = "changing"
    purpose = "Positions and windows"
    see = ("insert-rope",)
    method: Literal["pi", "ntk", "yarn", "llama3"]
    factor: float
    layers: Layers = "all"

    def run(self, graph: Graph, trace: Trace) -> None:
        if not 1 <= self.factor <= FARTHEST:
            raise WeftError(f"{self.name}: factor={self.factor} must be from 1 to {FARTHEST:g}")
        original = self.context(graph)
        ropes = rotations_of(graph, chosen(graph, self.layers, self.name), self.name, trace)
        tables = position_tables(graph) if self.layers == "all" else []
        done = [self._retuned(rope, recipe, original, trace) for rope, recipe in ropes.items()]
        done += [self._stretched(node, trace) for node in tables]
        if not any(done):
            why = f"%{trace.refusals[0].at}: {trace.refusals[0].reason}" if trace.refusals else "no rotations, no table"
            raise WeftError(f"{self.name}: graph {graph.name} has no positions to extend ({why})")
        if trace.rewrites[self.name]:
            self._describe(graph, original)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Rotations turn by the frequencies of the paper, as complex numbers; rows of tables are interpolated."""
        known = {n.output.name: n for n in after.nodes}
        meanings: dict[str, Any] = {}
        tables = position_tables(before)
        for node in before.nodes:
            name, new = node.output.name, known[node.output.name]
            old = recipe_of(node) if node.op is ops.rope else None
            if old is not None and old != recipe_of(new):
                settings = {key: node.attrs[key] for key in ("interleaved", "amplitude")}
                if self.method == "yarn":
                    settings["amplitude"] = temperature("yarn", self.factor)
                meanings[name] = expected(self._scaled(old, self.context(before)), new, **settings)
            elif node in tables and _param(new).shape != _param(node).shape:
                meanings[name] = partial(
                    _looked_up, self._table(node, equivalence.stage(before), equivalence.stage(after))
                )
        inputs = equivalence.inputs(after)
        equivalence.same(equivalence.run_as(before, inputs, meanings), equivalence.run(after, inputs), EXACT)

    def _scaled(self, recipe: RopeFrequencies, original: int) -> RopeFrequencies:
        return self.scaled(recipe, _SCALING[self.method], self.factor, original)

    def _retuned(self, rope: Node, old: RopeFrequencies, original: int, trace: Trace) -> bool:
        """Replace the `old` frequencies of the node `rope`; return False if refused."""
        if old.scaling != "none":
            if (old.scaling, old.factor) == (_SCALING[self.method], self.factor):
                return True
            reason = f"its frequencies are scaled already ({old.scaling}, factor {old.factor:g})"
            trace.refuse(self.name, rope.output.name, reason)
            return False
        recipe = self._scaled(old, original)
        check_scaling(recipe, self.name)
        retune(rope, recipe, recipe.attention_factor() if self.method == "yarn" else None)
        trace.fired(self.name, rope.output.name)
        return True

    def _stretched(self, node: Node, trace: Trace) -> bool:
        """Lengthen the table of the position lookup `node`; return False if refused."""
        table, offset = _param(node), first_row(node)
        stretched = [r.factor for r in (table.recipe, *table.recipe.parts) if isinstance(r, Interpolate | Sinusoid)]
        factor = max(stretched, default=1.0)
        # A run before has done this: neither a rewrite nor a refusal.
        if factor == self.factor:
            return True
        if offset is None:
            trace.refuse(self.name, node.output.name, f"it cannot be told which row of %{table.name} is position 0")
            return False
        if factor != 1 or self.method != "pi":
            already = f"positions of the table %{table.name} are interpolated already, factor {factor:g}"
            only = "a table of positions can only be interpolated: method=pi"
            trace.refuse(self.name, node.output.name, only if factor == 1 else already)
            return False
        rows, width = table.shape
        length = int((rows - offset) * self.factor)
        new: Recipe
        if isinstance(table.recipe, Sinusoid) and not offset:
            new = replace(table.recipe, length=length, factor=self.factor)
        elif offset:
            # Rows in front of position 0 stand for no position (OPT has two) and stay.
            kept, rest = (Slice(table.recipe, 0, *ends) for ends in ((0, offset), (offset, rows)))
            new = Concat((kept, Interpolate(rest, length, self.factor)))
        else:
            new = Interpolate(table.recipe, length, self.factor)
        longer = derive(table, new, (offset + length, width))
        node.set_input(1, longer)
        replace_param(table, longer)
        trace.fired(self.name, node.output.name)
        return True

    def _describe(self, graph: Graph, original: int) -> None:
        """Say in graph.meta how far positions reach now."""
        for fact in _LENGTHS:
            if graph.meta.get(fact):
                graph.meta[fact] = int(graph.meta[fact] * self.factor)
        if self.original is not None:
            graph.meta["context"] = int(original * self.factor)

    def _table(self, node: Node, before: Graph, after: Graph) -> Array:
        """The table that the node should look up in `after`, after comparing it with what is there."""
        old = before.params[_param(node).name]
        wide = next(n for n in after.nodes if n.output.name == node.output.name)
        found = _param(wide).recipe.evaluate(after.reader).astype(np.float64)
        offset = first_row(node) or 0
        places = np.arange(len(found) - offset) / self.factor
        if isinstance(old.recipe, Sinusoid) and not offset:
            angle = places[:, None] / old.recipe.base ** (2 * np.arange(old.recipe.dim // 2) / old.recipe.dim)
            two = np.sin(angle), np.cos(angle)
            made = np.dstack(two).reshape(len(places), -1) if old.recipe.interleaved else np.hstack(two)
            if np.max(np.abs(made - found)) > 1e-6:
                raise WeftError(f"table %{old.name} is not that of sinusoids at interpolated positions")
            return found
        rows = old.recipe.evaluate(before.reader).astype(np.float64)
        columns = [np.interp(places, np.arange(len(rows) - offset), column) for column in rows[offset:].T]
        return np.concatenate([rows[:offset], np.stack(columns, 1)])


def _param(node: Node) -> Param:
    """The table of an embedding."""
    value = node.inputs[1]
    assert isinstance(value, Param)
    return value


def _looked_up(table: Array, ids: Array, _: Array) -> Array:
    return np.asarray(table[ids])

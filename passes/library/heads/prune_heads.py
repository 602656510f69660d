"""Prune attention heads."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from weft.ir import Graph, Node, Param, WeftError, ops
from weft.ir.recipes import Literal, Scale
from weft.ir.recipes.readers import Array

from ... import Pass, Trace
from ...analysis.layers import Layers, select_attentions
from ...analysis.projections import Branch, find_branch, find_output_linear
from ...core.equivalence import EquivalenceCheck
from ...edits.edit import erase_unused, require_param
from ...fitting.calibration import Activations, read_tokens
from .head_layout import HeadLayout, apply_layout, find_layouts, rearrange_columns
from .permute_heads import BiasCache, find_score_obstacle, rebuild_scores


class PruneHeads(Pass):
    """Remove key and value heads, together with the query heads that read them and their part of the output projection.

    In every layer that `layers` selects, the `count` KV heads that contribute least to the output are removed. Their
    contribution is the energy E‖O_h y_h‖² on `tokens` tokens of a `calibration` file (text, or token ids as .npy or
    .json), or ‖O_h V_h‖² without a file. Or `heads` lists the KV heads to remove. A second run prunes again.

    Condition: q, k and v come from linears, with only norms per head, scales, clips and rotations between linear and
    attention; only the output linear reads the result; sinks, and a bias per head or its source, are parameters. The
    result is exact if the removed heads contribute zero. It is an error if no head would be left, or if there are
    caches.

    Source: Michel 2019, Are Sixteen Heads Really Better than One? (arXiv 1905.10650).

    Example prune-heads{heads=[0]}, on the graph of mha-to-gqa.
    """

    name = "prune-heads"
    effect = "lossy"
    purpose = "Convert heads, cut heads and layers"
    idempotent: ClassVar[bool] = False
    count: int = 1
    heads: tuple[int, ...] = ()
    layers: Layers = "all"
    calibration: str | None = None
    tokens: int = 8192

    def run(self, graph: Graph, trace: Trace) -> None:
        if self.count < 1 or self.tokens < 1:
            raise WeftError(f"prune-heads: count={self.count} and tokens={self.tokens} must both be positive")
        if self.heads and (self.calibration is not None or self.count != 1):
            raise WeftError("prune-heads: heads= already names the heads to remove: leave out count= and calibration=")
        sites = []
        for node in select_attentions(graph, self.layers, self.name):
            if (reason := _find_obstacle(node)) is not None:
                trace.refuse(self.name, node.output.name, reason)
                continue
            sites.append(node)
            remaining_heads = set(range(node.attrs["kv_heads"])).difference(self.heads)
            if any(not 0 <= h < node.attrs["kv_heads"] for h in self.heads):
                valid = f"the KV heads of %{node.output.name} are 0 to {node.attrs['kv_heads'] - 1}"
                raise WeftError(f"prune-heads: heads={list(self.heads)} is out of range: {valid}")
            if len(remaining_heads) <= (0 if self.heads else self.count):
                raise WeftError(f"prune-heads: all KV heads of %{node.output.name} would be removed; remove fewer")
        remaining, biases = self._select_heads(graph, sites), BiasCache()
        for node in sites:
            trace.record_rewrite(self.name, node.output.name)
            _prune_heads(node, remaining[_find_output_weight(node)], biases)
        erase_unused(graph, [old.producer for old, _ in biases if old.producer is not None])

    def _select_heads(self, graph: Graph, sites: list[Node]) -> dict[Param, tuple[int, ...]]:
        """Return the KV heads that remain at each of `sites`, ascending, keyed by the weight of its output linear."""
        if self.heads:
            return {
                _find_output_weight(node): tuple(h for h in range(node.attrs["kv_heads"]) if h not in self.heads)
                for node in sites
            }
        token_ids = read_tokens(graph, self.calibration, self.tokens) if self.calibration else ()
        activations = Activations(graph, token_ids) if token_ids else None
        energies: dict[Param, Array] = {}
        for node in sites:
            o = _find_output_weight(node)
            energies[o] = energies.get(o, 0) + _measure_energies(node, activations)
        # A stable sort: among heads with equal energy the first stay, on every machine.
        return {
            o: tuple(sorted(np.argsort(-e, kind="stable")[: len(e) - self.count].tolist())) for o, e in energies.items()
        }

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that outputs do not change if the removed heads contribute zero."""
        silenced = equivalence.randomize_weights(before)
        for node in select_attentions(silenced, self.layers, self.name):
            if _find_obstacle(node) is None:
                o, groups = _find_output_weight(node), int(node.attrs["kv_heads"])
                removed = self.heads or range(self.count)
                head_scale = np.repeat([float(h not in removed) for h in range(groups)], int(o.shape[1]) // groups)
                o.recipe = Scale(o.recipe, Literal.from_array(head_scale), axis=1)
        # Without calibration: silenced heads have energy 0 by their weights, so they are removed first.
        replace(self, calibration=None).check_keeps(silenced, equivalence)


def _find_obstacle(node: Node) -> str | None:
    """Return a reason (str) why heads of the attention `node` cannot be removed; None if they can."""
    if node.op is not ops.attention:
        return f"it is {node.op.name}"
    if node.operand("v") is None:
        return "its keys are its values too"
    layouts = find_layouts(node, "qkv", lambda role, _, width: HeadLayout((0,), width))
    if isinstance(layouts, str):
        return layouts
    for branch, layout in layouts.values():
        if (norm := branch.norm) is not None and norm.output.width == branch.start.width > layout.width:
            return f"{norm.op.name} (%{norm.output.name}) takes the mean over all heads"
    if isinstance(o := find_output_linear(node), str):
        return o
    return find_score_obstacle(node)


def _find_output_weight(node: Node) -> Param:
    o = find_output_linear(node)
    assert isinstance(o, Node)
    return require_param(o, "weight")


def _measure_energies(node: Node, activations: Activations | None) -> Array:
    """Return [kv_heads]: Σ ‖O_h y_h‖² over tokens and query heads h of a KV head; Σ ‖O_h V_h‖² without activations."""
    heads, reader = int(node.attrs["heads"]), node.graph.reader
    outputs = _find_output_weight(node).recipe.evaluate(reader).astype(np.float64)
    outputs = outputs.reshape(len(outputs), heads, -1).swapaxes(0, 1)  # [heads, out, dv]
    if activations is not None:
        moment: Array = np.zeros(())
        for y in activations(node.output):
            by_head = y.reshape(-1, heads, y.shape[-1] // heads).swapaxes(0, 1).astype(np.float64)
            moment = moment + by_head.swapaxes(1, 2) @ by_head
    else:
        v = find_branch(node, "v")
        assert isinstance(v, Branch)
        start, stop = v.span
        rows = v.weight.recipe.evaluate(reader)[start:stop].astype(np.float64)
        rows = rows.reshape(node.attrs["kv_heads"], -1, rows.shape[1])
        moment = np.repeat(rows @ rows.swapaxes(1, 2), heads // len(rows), 0)
    energies = np.einsum("hod,hde,hoe->h", outputs, moment, outputs, optimize=True)
    return np.asarray(energies.reshape(node.attrs["kv_heads"], -1).sum(1))


def _prune_heads(node: Node, remaining: tuple[int, ...], biases: BiasCache) -> None:
    """Remove all KV heads of the attention `node` except `remaining`, with the query heads that read them."""
    run = node.attrs["heads"] // node.attrs["kv_heads"]
    order = tuple(h * run + i for h in remaining for i in range(run))
    layouts = find_layouts(node, "qkv", lambda role, _, width: HeadLayout(order if role == "q" else remaining, width))
    columns, o = HeadLayout(order, node.output.width // node.attrs["heads"]), find_output_linear(node)
    assert isinstance(layouts, dict) and isinstance(o, Node)
    apply_layout(node, layouts)
    rebuild_scores(node, order, biases, heads=len(order), kv_heads=len(remaining))
    rearrange_columns(o, columns)

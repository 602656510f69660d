"""Attention with fewer heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from weft.ir import Graph, Node, Param, Value, WeftError, interpret, ops
from weft.ir.recipes import Literal, Scale, Take
from weft.ir.recipes.readers import Array

from ...analysis.layers import Layers, chosen
from ...analysis.projections import Branch, branch_of, output_of, unpacked
from ...core.base import Pass
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.trace import Trace
from ...edits.edit import changed, derive, drop, replace_param
from ...fitting.calibration import Activations, read_tokens
from .head_layout import Layout, apply_layout, misfit
from .permute_heads import rearranged_bias


@dataclass(frozen=True)
class PruneHeads(Pass):
    """Leave out key and value heads, with the query heads that read them and what those add to the output.

    Of every layer that `layers` says, the `count` heads go that add least: by the energy E‖O_h y_h‖² of what they add
    on a `calibration` text (a text file, or token ids as .npy or .json, of which `tokens` are read), else by
    ‖O_h V_h‖². Or those go that `heads` lists. All layers keep equally many where they had so. A second run prunes
    again.

    Condition: q, k and v come from linears, with nothing but norms head by head, scales, clips and rotations between; o
    alone reads the result; a bias per head is a parameter or made from one. Nothing is lost where what goes adds
    nothing. An error where no head would be left, or where there are caches.

    Source: Michel 2019, Are Sixteen Heads Really Better than One? (arXiv 1905.10650).

    Example prune-heads{heads=[0]}::

        graph example {
          input %x: f32[batch, seq, 4]
          param %q.weight: f32[8, 4] = normal([8, 4], std=0.5, stream="q")
          param %k.weight: f32[8, 4] = normal([8, 4], std=0.5, stream="k")
          param %v.weight: f32[8, 4] = normal([8, 4], std=0.5, stream="v")
          param %o.weight: f32[4, 8] = normal([4, 8], std=0.5, stream="o")
          %q: f32[batch, seq, 8] = linear(%x, %q.weight)
          %k: f32[batch, seq, 8] = linear(%x, %k.weight)
          %v: f32[batch, seq, 8] = linear(%x, %v.weight)
          %y: f32[batch, seq, 8] = attention(%q, %k, %v, heads=2, kv_heads=2, causal=true)
          %o: f32[batch, seq, 4] = linear(%y, %o.weight)
          output o = %o
        }
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
            raise WeftError(f"prune-heads: count={self.count} and tokens={self.tokens} must be positive")
        if self.heads and (self.calibration is not None or self.count != 1):
            raise WeftError("prune-heads: heads says which heads go; it needs no count and no calibration")
        sites = []
        for node in chosen(graph, self.layers, self.name):
            if (reason := _reason(node)) is not None:
                trace.refuse(self.name, node.output.name, reason)
                continue
            sites.append(node)
            left = set(range(node.attrs["kv_heads"])).difference(self.heads)
            if any(not 0 <= h < node.attrs["kv_heads"] for h in self.heads):
                raise WeftError(f"prune-heads: %{node.output.name} has KV heads 0 to {node.attrs['kv_heads'] - 1}")
            if len(left) <= (0 if self.heads else self.count):
                raise WeftError(f"prune-heads: %{node.output.name} would have none left of its KV heads")
        remaining, biases = self._kept(graph, sites), dict[tuple[Value, tuple[int, ...]], Value]()
        for node in sites:
            at = node.output.name
            _prune(node, remaining[_output_weight(node)], biases)
            trace.fired(self.name, at)
        drop(graph, [old.producer for old, _ in biases if old.producer is not None])

    def _kept(self, graph: Graph, sites: list[Node]) -> dict[Param, tuple[int, ...]]:
        """The KV heads that stay, by the weight of the output linear: of a layer applied twice, the same both times."""
        if self.heads:
            return {
                _output_weight(node): tuple(h for h in range(node.attrs["kv_heads"]) if h not in self.heads)
                for node in sites
            }
        texts = read_tokens(graph, self.calibration, self.tokens) if self.calibration else ()
        activations = Activations(graph, texts) if texts else None
        energies: dict[Param, Array] = {}
        for node in sites:
            o = _output_weight(node)
            energies[o] = energies.get(o, 0) + _energies(node, activations)
        # Stable: of heads with equal energy the first stay, on every machine.
        return {
            o: tuple(sorted(np.argsort(-e, kind="stable")[: len(e) - self.count].tolist())) for o, e in energies.items()
        }

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """When the removed heads contribute zero, nothing is lost."""
        silent = equivalence.stage(before)
        for node in chosen(silent, self.layers, self.name):
            if _reason(node) is None:
                o, groups = _output_weight(node), int(node.attrs["kv_heads"])
                gone = self.heads or range(self.count)
                heard = np.repeat([float(h not in gone) for h in range(groups)], int(o.shape[1]) // groups)
                o.recipe = Scale(o.recipe, Literal.of(heard), axis=1)
        pruned = silent.clone()
        # Without the text: silenced heads have energy 0 by their weights, and go first.
        replace(self, calibration=None).run(pruned, Trace())
        inputs = equivalence.inputs(before)
        equivalence.same(interpret(silent, inputs), interpret(pruned, inputs), EXACT)


def _reason(node: Node) -> str | None:
    """Say why heads of the attention `node` cannot be removed; None if they can."""
    if node.op is not ops.attention:
        return f"it is {node.op.name}"
    if node.operand("v") is None:
        return "its keys are its values too"
    for role in "qkv":
        branch = branch_of(node, role)
        if isinstance(branch, str):
            return branch
        count = node.attrs["heads" if role == "q" else "kv_heads"]
        if (reason := misfit(branch, Layout((0,), branch.start.width // count))) is not None:
            return reason
        if (norm := branch.norm) is not None and norm.output.width == branch.start.width and count > 1:
            return f"{norm.op.name} (%{norm.output.name}) takes the mean over all heads"
    if isinstance(o := output_of(node), str):
        return o
    sinks, bias = node.operand("sinks"), node.operand("bias")
    if not (sinks is None or isinstance(sinks, Param)):
        return f"its sinks %{sinks.name} are computed"
    rearranged = None if bias is None else rearranged_bias(bias, tuple(range(node.attrs["heads"])))
    return rearranged if isinstance(rearranged, str) else None


def _output_weight(node: Node) -> Param:
    o = output_of(node)
    weight = o.operand("weight") if isinstance(o, Node) else None
    assert isinstance(weight, Param)
    return weight


def _energies(node: Node, activations: Activations | None) -> Array:
    """Return the energy that the query heads of each KV head add to the output, as the class defines it."""
    heads, reader = int(node.attrs["heads"]), node.graph.reader
    outputs = _output_weight(node).recipe.evaluate(reader).astype(np.float64)
    outputs = outputs.reshape(len(outputs), heads, -1).swapaxes(0, 1)  # [heads, out, dv]
    if activations is not None:
        moments: Array = np.zeros(())
        for y in activations(node.output):
            by_head = y.reshape(-1, heads, y.shape[-1] // heads).swapaxes(0, 1).astype(np.float64)
            moments = moments + by_head.swapaxes(1, 2) @ by_head
    else:
        v = branch_of(node, "v")
        assert isinstance(v, Branch)
        start, stop = v.span
        rows = v.weight.recipe.evaluate(reader)[start:stop].astype(np.float64)
        rows = rows.reshape(node.attrs["kv_heads"], -1, rows.shape[1])
        moments = np.repeat(rows @ rows.swapaxes(1, 2), heads // len(rows), 0)
    energies = np.einsum("hod,hde,hoe->h", outputs, moments, outputs, optimize=True)
    return np.asarray(energies.reshape(node.attrs["kv_heads"], -1).sum(1))


def _prune(node: Node, remaining: tuple[int, ...], biases: dict[tuple[Value, tuple[int, ...]], Value]) -> None:
    """Leave the attention `node` the KV heads `remaining`, and the query heads that read them."""
    run = node.attrs["heads"] // node.attrs["kv_heads"]
    order = tuple(h * run + i for h in remaining for i in range(run))
    sides = {}
    for role, heads in (("q", order), ("k", remaining), ("v", remaining)):
        branch = unpacked(node, role)
        sides[role] = branch, Layout(heads, branch.start.width // node.attrs["heads" if role == "q" else "kv_heads"])
    columns = Layout(order, node.output.width // node.attrs["heads"])
    apply_layout(node, sides)
    sinks, bias = node.operand("sinks"), node.operand("bias")
    new_sinks = derive(sinks, Take(sinks.recipe, order), (len(order),)) if isinstance(sinks, Param) else None
    if bias is not None:
        if (bias, order) not in biases:
            rearranged = rearranged_bias(bias, order)
            assert not isinstance(rearranged, str)
            biases[bias, order] = rearranged() if callable(rearranged) else rearranged
        bias = biases[bias, order]
    node = changed(node, {"bias": bias, "sinks": new_sinks}, heads=len(order), kv_heads=len(remaining))
    replace_param(sinks, new_sinks)
    weight, o = _output_weight(node), output_of(node)
    assert isinstance(o, Node)
    fewer = columns.derived(weight, axis=1)
    changed(o, {"weight": fewer})
    replace_param(weight, fewer)

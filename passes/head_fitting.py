"""Merged key and value heads fitted to what attentions compute: the algebra of `head_conversion`, on a graph.

A `Fitter` follows a graph on a calibration text. Asked about one attention after the other, it computes what their
maps see there, and from that the weights for fewer heads; they go into an archive on top of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.ir import Graph, Node, Param, Recipe, Value
from weft.ir.archive import Array, Overlay
from weft.ir.recipes import Source

from .calibration import Activations
from .head_conversion import Rotation, merged_keys, merged_values
from .head_moments import moments
from .projections import Branch, branch_of, output_of

Fitted = dict[str, tuple[Recipe, Recipe | None]]  # weight and bias of new linears, by role: q, k, v, o


class Fitter:
    """Fits attentions of `graph` to `texts` (see `read_tokens`); without any, to the weights alone.

    `sequential`: what an attention sees is what the graph computes as it was changed before, not as it came. An
    attention whose weights were fitted before, in a layer applied twice, gets the same again.
    """

    def __init__(self, graph: Graph, texts: Sequence[Array], sequential: bool) -> None:
        self._archive = graph.archive = Overlay(graph.archive)
        watched = graph if sequential else graph.clone()
        self._watched = dict(zip(graph.nodes, watched.nodes, strict=True))
        self._activations = Activations(watched, texts) if texts else None
        self._fitted: dict[tuple[object, ...], tuple[Fitted, list[str]]] = {}

    def fit(self, node: Node, groups: int) -> tuple[Fitted, list[str]]:
        """Weights that give the attention `node` so many KV heads, and why those of some roles are missing.

        Its keys and values must come from linears.
        """
        q, k, v = (branch_of(node, role) for role in "qkv")
        o = output_of(node)
        assert isinstance(k, Branch) and isinstance(v, Branch)
        rotation = _rotation(q, k)
        opaque = o if isinstance(o, str) else _opaque(v)
        made = tuple(
            part
            for b in (q, k, v)
            if isinstance(b, Branch)
            for part in (b.weight.recipe, b.bias and b.bias.recipe, b.span)
        )
        if made in self._fitted:
            return self._fitted[made]
        heads, kv_heads = node.attrs["heads"], node.attrs["kv_heads"]
        seen = moments(self._watched[node], groups, self._activations)
        maps: dict[str, tuple[Array, bool]] = {}
        if isinstance(q, Branch) and isinstance(rotation, Rotation):
            queries, keys = self._map(q, heads), self._map(k, kv_heads)
            inputs = _fitting(seen.q, queries), _fitting(seen.k, keys)
            new = merged_keys(queries, keys, groups, *inputs, seen.spread, rotation)
            maps["q"], maps["k"] = (new[0], q.bias is not None), (new[1], k.bias is not None)
        if isinstance(o, Node) and not opaque:
            weight = self._evaluated(o.operand("weight"))
            outputs = weight.reshape(len(weight), heads, -1).swapaxes(0, 1)
            values = self._map(v, kv_heads)
            values, outputs = merged_values(values, outputs, groups, _fitting(seen.v, values))
            maps["v"], maps["o"] = (
                (values, v.bias is not None),
                (outputs.swapaxes(0, 1).reshape(1, *weight.shape), False),
            )
        dtype = k.weight.recipe.read(self._archive, 0, 1).dtype
        fitted = {role: self._kept(f"{node.output.name}.{role}", a.astype(dtype), b) for role, (a, b) in maps.items()}
        reasons = [f"keys: {rotation}"] if isinstance(rotation, str) else []
        self._fitted[made] = fitted, reasons + ([f"values: {opaque}"] if opaque else [])
        return self._fitted[made]

    def _evaluated(self, param: Value | None) -> Array:
        assert isinstance(param, Param)
        return param.recipe.evaluate(self._archive).astype(np.float64)

    def _map(self, branch: Branch, heads: int) -> Array:
        """[heads, d, width]; with a bias, which is a last column, [heads, d, width + 1]."""
        start, stop = branch.span
        columns = [self._evaluated(branch.weight)[start:stop]]
        if branch.bias is not None:
            columns.append(self._evaluated(branch.bias)[start:stop, None])
        return np.concatenate(columns, 1).reshape(heads, (stop - start) // heads, -1)

    def _kept(self, name: str, maps: Array, biased: bool) -> tuple[Recipe, Recipe | None]:
        """Recipes of the weight and the bias in `maps` [heads, d, width], from now on in the archive."""
        rows = maps.reshape(-1, maps.shape[-1])
        self._archive.put(f"{name}.weight", rows[:, : rows.shape[1] - biased])
        if not biased:
            return Source(f"{name}.weight"), None
        self._archive.put(f"{name}.bias", rows[:, -1])
        return Source(f"{name}.weight"), Source(f"{name}.bias")


def _fitting(moment: Array, maps: Array) -> Array:
    """`moment` of the inputs that `maps` have, without the 1 where they have no bias."""
    n = maps.shape[-1]
    return moment[..., :n, :n]


def _rotation(q: Branch | str, k: Branch) -> Rotation | str:
    """How queries and keys are rotated, or why they cannot be fitted."""
    if isinstance(q, str):
        return q
    if why := _opaque(q) or _opaque(k):
        return why
    if q.rope is None or k.rope is None:
        return Rotation(0, False) if q.rope is k.rope else "queries and keys are rotated differently"
    turns = [[n for n in b.between if n.op.name == "rope"] for b in (q, k)]
    alike = {(n.inputs[2], n.attrs["interleaved"]) for n in (q.rope, k.rope)}
    if any(len(found) > 1 for found in turns) or len(alike) > 1:
        return "queries and keys are rotated differently"
    return Rotation(q.rope.inputs[2].width if q.rope.inputs[2] else 0, q.rope.attrs["interleaved"])


def _opaque(branch: Branch) -> str:
    """What stands between a linear and an attention that does not let heads change their basis."""
    if branch.plain:
        return ""
    node = next(n for n in branch.between if n.op.name not in ("rope", "reshape"))
    return f"{node.op.name} (%{node.output.name}) stands between the linear and the attention"

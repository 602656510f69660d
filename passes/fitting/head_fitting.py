"""Fit merged key and value heads to the outputs of attentions: the algebra of `head_conversion`, on a graph.

A `Fitter` runs a graph on calibration sequences. For one attention after another, it computes the activations that its
linears read, and from them the weights for fewer heads, which it stores in a reader on top of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.ir import Graph, Node, Param, Recipe, Value, ops
from weft.ir.recipes import Source
from weft.ir.recipes.readers import Array, SpilledTensors

from ..analysis.projections import Branch, find_branch, find_output_linear, find_projections
from ..edits.edit import require_param
from .calibration import Activations
from .head_conversion import Rotation, compress_to_latent, merge_keys, merge_values
from .head_moments import Moments, compute_moments

CAUTION = 5.0  # strength of the ridge: tokens, per input of the output linear, that count as much as its old weight


@dataclass
class Fit:
    """The new linears of an attention: `linears` maps q, k, v, o to recipes of weight and bias (None: no change).

    `linears` has q and k, or neither, and v and o, or neither; `reasons` state why a pair is missing. Of a latent
    attention, `linears` has the maps of `compress_to_latent`. `is_refitted` is True once `refit_output` has refitted
    the output linear.
    """

    linears: dict[str, tuple[Recipe, Recipe | None]]
    reasons: list[str]
    is_refitted: bool = False


class Fitter:
    """Fit the heads of the attentions of `graph` to activations on `texts` (see `read_tokens`), or to weights if empty.

    With `sequential`, activations are those of the graph with all changes so far, not of the original graph, and output
    linears can be refitted to compensate for errors. Attentions with the same linears share one `Fit`.
    """

    def __init__(self, graph: Graph, texts: Sequence[Array], sequential: bool) -> None:
        self._reader = graph.reader = SpilledTensors(graph.reader)
        # Cloned before any change: `refit_output` restores the outputs of this graph.
        before = graph.clone()
        self._original_nodes = dict(zip(graph.nodes, before.nodes, strict=True))
        self._before = Activations(before, texts) if texts else None
        self._now = Activations(graph, texts) if texts and sequential else None
        self._fits: dict[tuple[object, ...], Fit] = {}

    def fit(self, node: Node, groups: int) -> Fit:
        """Return new linears with `groups` KV heads for the attention `node`, whose k and v must have a `Branch`."""
        q, k, v = (find_branch(node, role) for role in "qkv")
        o = find_output_linear(node)
        assert isinstance(k, Branch) and isinstance(v, Branch)
        fit, is_new = self._open_fit((_make_key(q), _make_key(k), _make_key(v), _make_key(o)))
        if not is_new:
            return fit
        moments = self._compute_moments(node, groups)
        heads, kv_heads = node.attrs["heads"], node.attrs["kv_heads"]
        if isinstance(rotation := _find_rotation(q, k), str):
            fit.reasons.append(f"keys: {rotation}")
        elif isinstance(q, Branch):
            old_q, old_k = self._map(q, heads), self._map(k, kv_heads)
            inputs = _crop_moment(moments.q, old_q), _crop_moment(moments.k, old_k)
            new_q, new_k = merge_keys(old_q, old_k, groups, *inputs, moments.spread, rotation)
            fit.linears |= {"q": self._store_maps(node, q, "q", new_q), "k": self._store_maps(node, k, "k", new_k)}
        if opaque := o if isinstance(o, str) else _explain_obstacle(v):
            fit.reasons.append(f"values: {opaque}")
        elif isinstance(o, Node):
            weight = self._evaluate(o.operand("weight"))
            old_v, old_o = self._map(v, kv_heads), _split_columns(weight, heads)
            new_v, new_o = merge_values(old_v, old_o, groups, _crop_moment(moments.v, old_v))
            columns = new_o.swapaxes(0, 1).reshape(weight.shape)
            fit.linears["v"] = self._store_maps(node, v, "v", new_v)
            fit.linears["o"] = self._put(f"{node.output.name}.o.weight", columns, o), None
        return fit

    def fit_latent(self, node: Node, rank: int, pairs: Array) -> Fit | str:
        """Return the linears of a latent attention of `rank` in which only the rotary pairs `pairs` rotate, for the
        attention `node`; a reason (str) if it has none."""
        projections = find_projections(node)
        if isinstance(projections, str):
            return projections
        q, k, v, o = projections.q, projections.k, projections.v, projections.o
        assert v is not None
        if why := _explain_obstacle(v):
            return why
        if isinstance(rotation := _find_rotation(q, k), str):
            return rotation
        fit, is_new = self._open_fit((_make_key(q), _make_key(k), _make_key(v), _make_key(o)))
        if not is_new:
            return fit
        heads, kv_heads = projections.heads, projections.kv_heads
        old_k, old_v = self._map(k, kv_heads), self._map(v, kv_heads)
        width = max(old_k.shape[2], old_v.shape[2])  # with a bias, if only one of them has it
        old_k, old_v = (np.pad(w, ((0, 0), (0, 0), (0, width - w.shape[2]))) for w in (old_k, old_v))
        old_o = _split_columns(self._evaluate(o.operand("weight")), heads)
        moments = self._compute_moments(node, 1)
        maps = compress_to_latent(self._map(q, heads), old_k, old_v, old_o, rank, pairs, rotation, moments)
        for role in ("k_up", "v_up"):
            # For every query head the rows of its KV head.
            rows = np.concatenate(np.repeat(maps[role], heads // kv_heads, 0))
            fit.linears[role] = self._put(f"{node.output.name}.{role}.weight", rows, k.linear), None
        for role, branch in {"q": q, "q_rope": q, "k_rope": k, "latent": k if k.bias is not None else v}.items():
            if maps[role].size:
                fit.linears[role] = self._store_maps(node, branch, role, maps[role])
        return fit

    def refit_output(self, old_node: Node, node: Node, fit: Fit) -> None:
        """Refit the output linear after the attention `node`, which replaces `old_node`, to the original output.

        The weight, changed in place in the reader, solves least squares with a ridge: the fewer tokens, the nearer to
        the present weight. Do nothing without texts, `sequential` or an output linear, or if `fit` is refitted.
        """
        old, new = find_output_linear(self._original_nodes[old_node]), find_output_linear(node)
        if fit.is_refitted or self._now is None or self._before is None or isinstance(old, str) or isinstance(new, str):
            return
        fit.is_refitted = True
        weight = self._evaluate(new.operand("weight"))
        gram, missed, count = np.zeros((weight.shape[1],) * 2), np.zeros_like(weight), 0
        inputs = self._now(node.output)
        # The weight of this linear changes below, so its outputs must not be cached.
        with self._now.override():
            outputs = self._now(new.output)
        for y, now, before in zip(inputs, outputs, self._before(old.output), strict=True):
            y, lost = y.reshape(-1, y.shape[-1]), (before - now).reshape(-1, len(weight))
            gram += y.T @ y
            missed += lost.T @ y
            count += len(y)
        gram += CAUTION / count * (np.trace(gram) or 1.0) * np.eye(len(gram))
        # Δ · gram = missed, solved transposed, as gram is symmetric. The key is that of `fit`: its recipe stays.
        self._put(f"{node.output.name}.o.weight", weight + np.linalg.solve(gram, missed.T).T, new)

    def _open_fit(self, key: tuple[object, ...]) -> tuple[Fit, bool]:
        """Return the fit of the linears in `key`, and whether it is new."""
        is_new = key not in self._fits
        return self._fits.setdefault(key, Fit({}, [])), is_new

    def _compute_moments(self, node: Node, groups: int) -> Moments:
        return compute_moments(node if self._now else self._original_nodes[node], groups, self._now or self._before)

    def _evaluate(self, param: Value | None) -> Array:
        assert isinstance(param, Param)
        return param.recipe.evaluate(self._reader).astype(np.float64)

    def _map(self, branch: Branch, heads: int) -> Array:
        """Return the weight rows of `branch` as float64 [heads, d, width], with a bias as one more column."""
        start, stop = branch.span
        columns = [self._evaluate(branch.weight)[start:stop]]
        if branch.bias is not None:
            columns.append(self._evaluate(branch.bias)[start:stop, None])
        return np.concatenate(columns, 1).reshape(heads, (stop - start) // heads, -1)

    def _store_maps(self, node: Node, branch: Branch, role: str, maps: Array) -> tuple[Recipe, Recipe | None]:
        """Store `maps` [heads, d, width (+ 1 for a bias)] in the reader; return the recipes of weight and bias."""
        rows, key, width = np.concatenate(maps), f"{node.output.name}.{role}", branch.weight.width
        weight = self._put(f"{key}.weight", rows[:, :width], branch.linear)
        return weight, None if branch.bias is None else self._put(f"{key}.bias", rows[:, width], branch.linear)

    def _put(self, key: str, array: Array, linear: Node) -> Recipe:
        """Store `array` in the reader as `key`, in the dtype of the weight of `linear`; return its recipe."""
        weight = require_param(linear, "weight").recipe
        self._reader.put(key, array.astype(weight.read(self._reader, 0, 1).dtype))
        return Source(key)


def _make_key(source: Branch | Node | str) -> object:
    if isinstance(source, Node):
        return source.operand("weight")
    return source if isinstance(source, str) else (source.weight, source.bias, source.span)


def _split_columns(weight: Array, heads: int) -> Array:
    """Return `weight` [out, heads·d] of an output linear as [heads, out, d]."""
    return weight.reshape(len(weight), heads, -1).swapaxes(0, 1)


def _crop_moment(moment: Array, maps: Array) -> Array:
    """Return `moment` [.., m, m] cropped to [.., n, n], the inputs of `maps` [.., n]; the constant 1 comes last."""
    n = maps.shape[-1]
    return moment[..., :n, :n]


def _find_rotation(q: Branch | str, k: Branch) -> Rotation | str:
    """Return the rotation of both queries and keys (no pairs without RoPE); a reason (str) if they cannot be fitted."""
    if isinstance(q, str):
        return q
    if why := _explain_obstacle(q) or _explain_obstacle(k):
        return why
    if q.rope is None or k.rope is None:
        # `is`: both are None, and nothing rotates.
        return Rotation(0, False) if q.rope is k.rope else "queries and keys are rotated differently"
    ropes = [[n for n in b.between if n.op is ops.rope] for b in (q, k)]
    alike = {(n.inputs[2], n.attrs["interleaved"]) for n in (q.rope, k.rope)}
    if any(len(branch_ropes) > 1 for branch_ropes in ropes) or len(alike) > 1:
        return "queries and keys are rotated differently"
    amplitude = q.rope.attrs["amplitude"] * k.rope.attrs["amplitude"]
    return Rotation(q.rope.required_operand("frequencies").width, q.rope.attrs["interleaved"], amplitude)


def _explain_obstacle(branch: Branch) -> str:
    """Return a reason: the first node between linear and attention that prevents a new basis; "" if there is none."""
    if branch.has_plain_path:
        return ""
    node = next(n for n in branch.between if n.op not in (ops.rope, ops.reshape))
    return f"{node.op.name} (%{node.output.name}) is between the linear and the attention"

"""Scales of quantized caches, fitted to the keys and values that attentions store for calibration sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.ops.caches import get_code_range
from weft.ir.recipes import Permute
from weft.ir.recipes.matrices import Inverse, RandomOrthogonal
from weft.ir.recipes.readers import EMPTY, Array
from weft.ir.schema.visible_keys import VisibleKeys
from weft.ir.types import sizes

from ...analysis.rotary import find_ropes
from ...analysis.states import find_specs, has_state
from ...edits.edit import add_scope, substitute_size
from ...fitting.calibration import Activations

RIDGE = 1e-4  # times the mean of a moment's diagonal, added to the diagonal
SEED = 1


@dataclass(frozen=True)
class HeadMap:
    """The map x → (x − shift) @ matrix per KV head, for x [.., kv_heads, width].
    `shift` is [kv_heads, width], or None for no shift. `matrix` is [kv_heads, width, width], or [width, width] if all
    heads share it."""

    shift: Array | None
    matrix: Array

    def __call__(self, x: Array) -> Array:
        centred = x if self.shift is None else x - self.shift
        return np.asarray((centred[..., None, :] @ self.matrix)[..., 0, :])

    def shift_outputs(self, offset: Array) -> HeadMap:
        """Return this map with `offset` [kv_heads, width] subtracted from its outputs; `shift` must not be None."""
        assert self.shift is not None
        shift = self.shift + (offset[..., None, :] @ np.linalg.inv(self.matrix))[..., 0, :]
        return HeadMap(shift.astype(np.float32), self.matrix)


def build_rotation(width: int) -> RandomOrthogonal:
    """Return the recipe of a fixed random orthogonal matrix [width, width], which mixes all channels of a head."""
    return RandomOrthogonal(width, SEED)


def balance_moments(keys: Array, queries: Array) -> Array:
    """Return the maps T [heads, width, width], given the second moments [heads, width, width] of `keys` and `queries`.
    Rounding channel c of k T to steps proportional to its range costs E[(k T)²_c] E[(q T⁻ᵀ)²_c]. T first makes both
    moments the same diagonal D, with the cost Σ D² over channels; a rotation then makes all entries of D about equal,
    which lowers the cost to (Σ D)² / width, the minimum."""
    matrices = []
    for key, query in zip(keys.astype(np.float64), queries.astype(np.float64), strict=True):
        key, query = (m + RIDGE * max(np.trace(m) / len(m), 1e-12) * np.eye(len(m)) for m in (key, query))
        root = np.linalg.cholesky(key)
        eigenvalues, eigenvectors = np.linalg.eigh(root.T @ query @ root)
        # L⁻ᵀ U makes the moment of keys the identity and that of queries diag(eigenvalues); √ splits it between both.
        matrices.append(np.linalg.inv(root).T @ eigenvectors * eigenvalues**0.25)
    rotated: Array = np.stack(matrices) @ build_rotation(keys.shape[-1]).evaluate(EMPTY)
    return rotated


def insert_maps(nodes: Sequence[Node], keys: HeadMap, values: HeadMap, store: Callable[[str, Array], Param]) -> None:
    """Insert the maps at keys and values of the attentions `nodes`, and the inverse maps at queries and outputs.
    All `nodes` read one cache; `values.matrix` is that of `build_rotation`; `store(name, array)` adds a parameter."""
    first = nodes[0]
    graph, kv_heads = first.graph, int(first.attrs["kv_heads"])
    with graph.inserting(before=first):
        k_map, mixing = store("k_map", keys.matrix), build_rotation(len(values.matrix))
        q_map, v_map, o_map = (
            graph.add_param(add_scope(graph, name), k_map.type.with_shape(*matrix.shape), recipe)
            for name, matrix, recipe in (
                ("q_map", keys.matrix, Permute(Inverse(k_map.recipe), (0, 2, 1))),
                ("v_map", values.matrix, mixing),
                ("o_map", values.matrix, Permute(mixing, (1, 0))),
            )
        )
        k_shift, v_shift = (
            None if shift is None else store(name, shift[:, None])
            for name, shift in (("k_shift", keys.shift), ("v_shift", values.shift))
        )
        mapped = []
        for name, shift, matrix in (("k", k_shift, k_map), ("v", v_shift, v_map)):
            value = first.required_operand(name)
            x = _split_heads(value, kv_heads, kv_heads)
            mapped.append(_join_heads(ops.matmul(x if shift is None else ops.sub(x, shift), matrix), value))
    for node in nodes:
        heads, q = int(node.attrs["heads"]), node.required_operand("q")
        with graph.inserting(before=node):
            node.set_input(0, _join_heads(ops.matmul(_split_heads(q, heads, kv_heads), q_map), q))
        for index, value in enumerate(mapped, 1):
            node.set_input(index, value)
        with graph.inserting(after=node):
            by_head = _split_heads(node.output, heads, kv_heads)
            y = ops.matmul(by_head, o_map)
            output = _join_heads(y if v_shift is None else ops.add(y, v_shift), node.output)
            assert by_head.producer is not None
            node.output.replace_uses(output, keep=[by_head.producer])


def _split_heads(x: Value, heads: int, kv_heads: int) -> Value:
    """Reshape x [batch, seq, heads · width] to [batch, seq, kv_heads, heads / kv_heads, width]."""
    return ops.reshape(x, shape=(*x.shape[:2], kv_heads, heads // kv_heads, x.width // heads))


def _join_heads(x: Value, template: Value) -> Value:
    """Reshape x to the shape of `template`: the inverse of `_split_heads`."""
    return ops.reshape(x, shape=template.shape)


Granularity = Literal["channel", "head", "tensor"]
SHRINK_FACTORS = np.linspace(0.3, 1.0, 29)  # factors of the largest magnitude that are tried for codes of 4 bits
HEADROOM = 1.1  # the factor for 8 bits: clipping other sequences costs more than finer steps gain
CONTEXT = 4096  # positions that keys are rotated to if the model does not state its context length


@dataclass(frozen=True)
class FittedCache:
    """Scales of a quantized cache, and the linear maps of keys and values that are applied before rounding.
    scales: (of keys, of values), each f32 [kv_heads · width] or [1]; (of keys,) if values are a part of the keys.
    maps: (of keys, of values), or None without maps."""

    scales: tuple[Array, ...]
    maps: tuple[HeadMap, HeadMap] | None = None


@dataclass(frozen=True)
class StoredRows:
    """Keys or values that an attention stores for calibration sequences.

    rows: [n, kv_heads, width], one per token. weights: [n, kv_heads, width or 1], of each squared rounding error.
    first: [kv_heads, width], the median over all sequences of the row of token 0.
    queries: [kv_heads, width, width], the weighted second moment of the queries; None if the rows are values.
    """

    rows: Array
    weights: Array
    first: Array
    queries: Array | None = None

    def add_reader(self, other: StoredRows) -> StoredRows:
        """Return these rows with the weights and moments of `other`, another reader of the same cache, added."""
        queries = None if self.queries is None or other.queries is None else self.queries + other.queries
        return replace(self, weights=self.weights + other.weights, queries=queries)


def fit_caches(
    graph: Graph, caches: Sequence[Sequence[Node]], texts: Sequence[Array], bits: int, per: Granularity
) -> Iterator[FittedCache]:
    """Yield the fitted scales and maps of each of `caches`, in order; a cache is the list of attentions that read it.
    They are fitted to the keys and values that the attentions store for `texts`, batches of token ids [batch, length].
    There are maps if codes have fewer than 8 `bits`, for caches with separate keys and values."""
    copy, copies = remove_caches(graph)
    activations = Activations(copy, texts, dtype=np.float32)
    positions = _spread_positions(copy, texts)
    for nodes in caches:
        readers = [_StoredRowsCollector(activations, copies[node], positions) for node in nodes]
        add_rotated = any(reader.rotated_nodes for reader in readers)
        per_reader = (reader.collect_rows(add_rotated) for reader in readers)
        stored = [functools.reduce(StoredRows.add_reader, parts) for parts in zip(*per_reader, strict=True)]
        if bits < 8 and len(stored) > 1:
            yield _fit_maps(nodes, stored, bits, per)
        else:
            yield FittedCache(tuple(fit_scale(x.rows, bits, per, x.weights) for x in stored))


def _fit_maps(nodes: Sequence[Node], stored: Sequence[StoredRows], bits: int, per: Granularity) -> FittedCache:
    # With sinks, weights sum to less than 1 and depend on a common shift of scores; soft caps distort such a shift.
    sinks = any(node.operand("sinks") is not None for node in nodes)
    capped = any(node.attrs["softcap"] is not None for node in nodes)
    scales, maps = list[Array](), list[HeadMap]()
    for x, shifts in zip(stored, (not sinks and not capped, not sinks), strict=True):
        shift = x.rows.mean(0) if shifts else None
        centred = x.rows if shift is None else x.rows - shift
        if x.queries is None:
            matrix = build_rotation(centred.shape[-1]).evaluate(EMPTY)
        else:
            matrix = balance_moments(centred.transpose(1, 2, 0) @ centred.swapaxes(0, 1), x.queries)
        head_map = HeadMap(shift, matrix)
        first = head_map(x.first) if shifts else None
        # After such a matrix errors of all channels weigh about the same.
        scale = fit_scale(head_map(x.rows), bits, per, x.weights.mean(-1, keepdims=True), first)
        scales.append(scale)
        if first is not None:
            steps = scale if scale.size == 1 else scale.reshape(first.shape)
            head_map = head_map.shift_outputs(get_remainder(first, steps, bits))
        maps.append(head_map)
    return FittedCache(tuple(scales), (maps[0], maps[1]))


def fit_scale(x: Array, bits: int, per: Granularity, weight: Array, first: Array | None = None) -> Array:
    """Return the scales, f32 [heads · width] or [1] (per tensor), that round x [n, heads, width] with least error.
    The error is the sum of squared errors times `weight` [n, heads, width or 1]. If `first` [heads, width] is given,
    each candidate scale is tried on x shifted so that `first` is exactly representable with this scale."""
    groups = {"channel": x.shape[1] * x.shape[2], "head": x.shape[1], "tensor": 1}[per]
    rows, counts = (_group_columns(np.broadcast_to(part, x.shape), groups) for part in (x, weight))
    anchor = None if first is None else _group_columns(first[None], groups)
    low, high = get_code_range(bits)
    widest = np.abs(rows).max((1, 2), keepdims=True)
    widest[widest == 0] = 1  # all zero: any scale is exact
    best, least = widest, np.full(widest.shape, np.inf)
    for factor in SHRINK_FACTORS if bits < 8 else (HEADROOM,):
        scale = widest * np.float32(factor / high)
        shifted = rows if anchor is None else rows - get_remainder(anchor, scale, bits)
        error = np.clip(np.rint(shifted / scale), low, high) * scale - shifted
        cost = (np.square(error) * counts).sum((1, 2), keepdims=True)
        best, least = np.where(cost < least, scale, best), np.minimum(cost, least)
    scales: Array = best.reshape(-1).astype(np.float32)
    return scales if per != "head" else scales.repeat(x.shape[2])


def get_remainder(x: Array, scale: Array, bits: int) -> Array:
    """Return x − scale · code, with the nearest code that `bits` bits can represent."""
    return np.asarray(x - np.clip(np.rint(x / scale), *get_code_range(bits)) * scale)


def _group_columns(x: Array, groups: int) -> Array:
    """Reshape x [n, heads, width] to f32 [groups, n, heads · width / groups]."""
    return np.ascontiguousarray(x.reshape(len(x), groups, -1).transpose(1, 0, 2), np.float32)


class _StoredRowsCollector:
    """A collector of the keys and values that the attention `node` stores, with weights of their rounding errors.
    To first order, an error e of key j changes the output of query i by p_ij (q_i · e) (v_j − o_i), and an error e of
    value j by p_ij e, with attention weights p and outputs o. Errors of different keys and channels are assumed
    independent: a weight is the sum of squares of these factors over queries and heads."""

    def __init__(self, activations: Activations, node: Node, positions: Sequence[Array]) -> None:
        self.node, self.attrs = node, node.attrs
        self.kv_heads = int(node.attrs["kv_heads"])
        self._activations, self._positions = activations, positions

    @property
    def rotated_nodes(self) -> list[Node]:
        """Return the `rope` nodes of queries and keys whose positions are the input position_ids."""
        at = self.node.graph.inputs.get("position_ids")
        return [rope for rope in find_ropes(self.node) if rope.operand("positions") is at]

    def collect_rows(self, add_rotated: bool) -> list[StoredRows]:
        """Return [keys, values], each with one row per token; [keys] if the attention has no operand v.
        With `add_rotated`, keys have further rows: all tokens but the first of a sequence, rotated to positions spread
        over the context, or repeated without RoPE, since all readers of a cache must return the same number of rows."""
        rotated = self._rotate_to_positions()
        names = [name for name in "qkv" if self.node.operand(name) is not None]
        bias_value = self.node.operand("bias")
        bias = None if bias_value is None else self._read_value(bias_value)
        values = {name: self._activations(self.node.required_operand(name)) for name in names}
        key_stats, value_stats = _Accumulator(), _Accumulator()
        for i, flat_keys in enumerate(values["k"]):
            q, k = self._split_queries(values["q"][i]), self._split_heads(flat_keys)
            v = k[..., : self.attrs["value_dim"]] if "v" not in values else self._split_heads(values["v"][i])
            on_scores, on_outputs = self._compute_effects(q, k, v, None if bias is None else bias[i])
            rows = [(q, k), *([rotated[i] if rotated else (q, k)] if add_rotated else [])]
            for at, (queries, stored) in enumerate(rows):
                weight = (on_scores.swapaxes(-1, -2) @ np.square(queries)).sum(2)
                if "v" not in values:
                    weight[..., : v.shape[-1]] += on_outputs[..., None]
                # The first token draws much attention, but only at the start of a sequence: moved keys omit it.
                key_stats.add(stored, weight, at)
                key_stats.add_queries(queries, on_scores)
            value_stats.add(v, on_outputs[..., None])
        return [key_stats.merge(), value_stats.merge()] if "v" in values else [key_stats.merge()]

    def _compute_effects(self, q: Array, k: Array, v: Array, bias: Array | None) -> tuple[Array, Array]:
        """Return the effects of errors on the outputs, as squared factors (see the class): (of scores, of values). For
        scores: scale² Σ_channels (p_ij (v_j − o_i))² [batch, kv_heads, group, queries, keys]; for values: Σ p_ij² over
        queries and group [batch, kv_heads, keys]. q is [batch, kv_heads, group, n, d]; k and v are [batch, kv_heads, n,
        d]."""
        scale = self.attrs["scale"] or q.shape[-1] ** -0.5
        scores = q @ k[:, :, None].swapaxes(-1, -2) * scale
        if (cap := self.attrs["softcap"]) is not None:
            scores = cap * np.tanh(scores / cap)
        if bias is not None:
            full_bias = np.broadcast_to(bias, (bias.shape[0], self.attrs["heads"], *bias.shape[2:]))
            scores = scores + full_bias.reshape(len(full_bias), self.kv_heads, -1, *full_bias.shape[2:])
        at = np.arange(k.shape[2])
        visible = VisibleKeys.from_attrs(self.attrs).mask(at[:, None], at[None])
        scores = np.where(visible, scores, -np.inf)
        peak = scores.max(-1, keepdims=True)
        peak = np.where(np.isfinite(peak), peak, 0)  # a row without visible keys
        p = np.exp(scores - peak)
        normalizer = p.sum(-1, keepdims=True)
        if (sinks := self.node.operand("sinks")) is not None:
            normalizer += np.exp(self._read_value(sinks)[0].reshape(1, self.kv_heads, -1, 1, 1) - peak)
        p /= np.where(normalizer == 0, 1, normalizer)
        o = p @ v[:, :, None]
        distances = np.square(v).sum(-1)[:, :, None, None] - 2 * (o @ v[:, :, None].swapaxes(-1, -2))
        distances += np.square(o).sum(-1)[..., None]
        squares = np.square(p)
        return squares * np.maximum(distances, 0) * scale**2, squares.sum((2, 3))

    def _rotate_to_positions(self) -> list[tuple[Array, Array]]:
        """Return (queries, keys) per batch, rotated to positions all over the context; [] without `rotated_nodes`."""
        if not self.rotated_nodes:
            return []
        rotated = {}
        for rope in self.rotated_nodes:
            x, table = (self._read_value(rope.required_operand(name)) for name in ("x", "frequencies"))
            operands = zip(x, self._positions, table, strict=True)
            rotated[rope.output] = [np.asarray(ops.rope.reference(*xs, **rope.attrs)) for xs in operands]
        with self._activations.override(rotated):
            queries, keys = (self._activations(self.node.required_operand(name)) for name in "qk")
        return [(self._split_queries(q), self._split_heads(k)) for q, k in zip(queries, keys, strict=True)]

    def _read_value(self, value: Value) -> list[Array]:
        """Return the activations of `value`, one array per batch; for a parameter, its elements once per batch."""
        if isinstance(value, Param):
            return [value.recipe.evaluate(value.graph.reader)] * len(self._positions)
        return self._activations(value)

    def _split_heads(self, x: Array) -> Array:
        """Reshape keys or values [batch, n, kv_heads · d] to [batch, kv_heads, n, d]."""
        return x.reshape(*x.shape[:2], self.kv_heads, -1).swapaxes(1, 2).astype(np.float32)

    def _split_queries(self, x: Array) -> Array:
        """Reshape queries [batch, n, heads · d] to [batch, kv_heads, group, n, d]."""
        by_head = x.reshape(*x.shape[:2], self.attrs["heads"], -1).swapaxes(1, 2).astype(np.float32)
        return by_head.reshape(len(x), self.kv_heads, -1, *by_head.shape[2:])


class _Accumulator:
    """An accumulator that builds one `StoredRows` from all batches."""

    def __init__(self) -> None:
        self._rows, self._weights, self._firsts = list[Array](), list[Array](), list[Array]()
        self._queries: Array | None = None

    def add(self, x: Array, weights: Array, start: int = 0) -> None:
        """Add keys or values x [batch, heads, n, d] from token `start` on, with `weights` [batch, heads, n, d or 1].
        If `start` is 0, the first tokens also enter the median."""
        self._rows.append(_flatten_rows(x[:, :, start:]))
        self._weights.append(_flatten_rows(weights[:, :, start:]))
        if not start:
            self._firsts.append(x[:, :, 0])

    def add_queries(self, queries: Array, on_scores: Array) -> None:
        """Add the second moment of queries [batch, heads, group, n, d], weighted by `on_scores` [.., n, keys]."""
        weighted = queries * on_scores.sum(-1, keepdims=True)
        moment = (weighted.swapaxes(-1, -2) @ queries).sum((0, 2))
        self._queries = moment if self._queries is None else self._queries + moment

    def merge(self) -> StoredRows:
        first = np.median(np.concatenate(self._firsts), axis=0)
        return StoredRows(np.concatenate(self._rows), np.concatenate(self._weights), first, self._queries)


def _flatten_rows(x: Array) -> Array:
    """Reshape x [batch, heads, n, d] to [batch · n, heads, d]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _spread_positions(graph: Graph, texts: Sequence[Array]) -> list[Array]:
    """Return consecutive positions [batch, length] for each of `texts`, with starts spread evenly over the context.
    Keys are stored rotated, and later positions rotate them to values that the first positions do not reach."""
    context = int(graph.meta.get("context") or CONTEXT)
    starts = iter(np.linspace(0, 1, sum(len(ids) for ids in texts)))
    return [
        np.array([int(next(starts) * max(0, context - ids.shape[1])) + np.arange(ids.shape[1]) for _ in ids])
        for ids in texts
    ]


def remove_caches(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """Return a copy of `graph` without caches, states and unread inputs, and a dict from each node to its copy."""
    copy = graph.clone()
    copies = dict(zip(graph.nodes, copy.nodes, strict=True))
    for name, value in list(copy.outputs.items()):
        if (producer := value.producer) is not None and value is not producer.output and has_state(producer):
            del copy.outputs[name]
    # The mask of past and new tokens becomes a mask of the new tokens.
    substitute_size(copy, "total", sizes.sym("seq"))
    for node, copied in list(copies.items()):
        if has_state(node):
            copies[node] = _drop_past(copy, copied)
    for name, value in list(copy.inputs.items()):
        if not value.uses:
            del copy.inputs[name]
    return copy, copies


def _drop_past(graph: Graph, node: Node) -> Node:
    absent_names = {spec.past_operand for spec in find_specs(node)} | {spec.positions for spec in find_specs(node)}
    operands = [None if o.name in absent_names else v for o, v in zip(node.op.operands, node.inputs, strict=False)]
    attrs = {**node.attrs, **({"rolling": False} if "rolling" in node.attrs else {})}
    with graph.inserting(before=node):
        results = node.op.emit(*operands, **attrs)
    node.output.replace_uses(results[0])
    graph.erase(node)
    assert results[0].producer is not None
    return results[0].producer

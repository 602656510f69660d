"""Scales of quantized caches, fitted to the keys and values that attentions store of a text."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.ops.caches import limits
from weft.ir.recipes.readers import EMPTY, Array
from weft.ir.schema.visible_keys import VisibleKeys
from weft.ir.types import sizes

from ...analysis.rotary import rotations
from ...analysis.states import has_state, specs
from ...fitting.calibration import Activations
from .head_maps import HeadMap, balanced, rotation

Per = Literal["channel", "head", "tensor"]
SHRINK = np.linspace(0.3, 1.0, 29)  # factors of the largest number that are tried for codes of 4 bits
ROOM = 1.1  # the factor for those of 8 bits: what other texts exceed costs more than their finer steps bring
CONTEXT = 4096  # positions that keys are rotated to, where the model does not say how far it reads


@dataclass(frozen=True)
class FittedCache:
    """Scales f32 [kv_heads · width] or [1] of keys and, where they are apart, values, and maps before and behind."""

    scales: tuple[Array, ...]
    maps: tuple[HeadMap, HeadMap] | None = None


@dataclass(frozen=True)
class Stored:
    """Keys or values that an attention stores of texts.

    `rows` are [n, kv_heads, width], their `weights` in errors [n, kv_heads, width or 1]; `first` is what the first
    tokens of texts have [kv_heads, width]; `queries` is the second moment of the queries that meet keys [kv_heads,
    width, width].
    """

    rows: Array
    weights: Array
    first: Array
    queries: Array | None = None

    def also(self, other: Stored) -> Stored:
        """Return the same as two attentions read it, whose errors add up."""
        met = [queries for queries in (self.queries, other.queries) if queries is not None]
        return replace(self, weights=self.weights + other.weights, queries=sum(met[1:], met[0]) if met else None)


def fitted(
    graph: Graph, caches: Sequence[Sequence[Node]], texts: Sequence[Array], bits: int, per: Per
) -> Iterator[FittedCache]:
    """Fit scales and maps of each of `caches`, given by the attentions that read it, in order, to what it stores of the
    `texts` (ids [texts, length])."""
    copy, twins = without_caches(graph)
    activations = Activations(copy, texts, dtype=np.float32)
    places = _places(copy, texts)
    for nodes in caches:
        seen = [_Seen(activations, twins[node], places) for node in nodes]
        turned = any(one.turned for one in seen)
        each = (one.stored(turned) for one in seen)
        stored = [functools.reduce(Stored.also, parts) for parts in zip(*each, strict=True)]
        mapped = bits < 8 and len(stored) > 1
        yield _mapped(nodes, stored, bits, per) if mapped else _scaled(stored, bits, per)


def _scaled(stored: Sequence[Stored], bits: int, per: Per) -> FittedCache:
    return FittedCache(tuple(scale_of(x.rows, bits, per, x.weights) for x in stored))


def _mapped(nodes: Sequence[Node], stored: Sequence[Stored], bits: int, per: Per) -> FittedCache:
    # A sink takes part of the weights, and the cap of scores does not let what all of them share through.
    sinks = any(node.operand("sinks") is not None for node in nodes)
    capped = any(node.attrs["softcap"] is not None for node in nodes)
    scales, maps = list[Array](), list[HeadMap]()
    for x, shifts in zip(stored, (not sinks and not capped, not sinks), strict=True):
        shift = x.rows.mean(0) if shifts else None
        centred = x.rows if shift is None else x.rows - shift
        if x.queries is None:
            matrix = rotation(centred.shape[-1]).evaluate(EMPTY)
        else:
            matrix = balanced(centred.transpose(1, 2, 0) @ centred.swapaxes(0, 1), x.queries)
        map = HeadMap(shift, matrix)
        first = map(x.first) if shifts else None
        # Errors of all channels matter as much behind such a matrix.
        scale = scale_of(map(x.rows), bits, per, x.weights.mean(-1, keepdims=True), first)
        scales.append(scale)
        maps.append(map if first is None else map.moved(on_codes(first, _by_channel(scale, first), bits)))
    return FittedCache(tuple(scales), (maps[0], maps[1]))


def scale_of(x: Array, bits: int, per: Per, weight: Array, first: Array | None = None) -> Array:
    """The scales, f32 [heads · width] or [1], that round x [n, heads, width] with the least sum of squared errors times
    `weight` [n, heads, width or 1]; where `first` [heads, width] is given, of x moved so that a code stands for it."""
    groups = {"channel": x.shape[1] * x.shape[2], "head": x.shape[1], "tensor": 1}[per]
    rows, counts = (_grouped(np.broadcast_to(part, x.shape), groups) for part in (x, weight))
    anchor = None if first is None else _grouped(first[None], groups)
    low, high = limits(bits)
    widest = np.abs(rows).max((1, 2), keepdims=True)
    widest[widest == 0] = 1  # any scale will do
    best, least = widest, np.full(widest.shape, np.inf)
    for factor in SHRINK if bits < 8 else (ROOM,):
        scale = widest * np.float32(factor / high)
        moved = rows if anchor is None else rows - on_codes(anchor, scale, bits)
        error = np.clip(np.rint(moved / scale), low, high) * scale - moved
        cost = (np.square(error) * counts).sum((1, 2), keepdims=True)
        best, least = np.where(cost < least, scale, best), np.minimum(cost, least)
    found: Array = best.reshape(-1).astype(np.float32)
    return found if per != "head" else found.repeat(x.shape[2])


def on_codes(x: Array, scale: Array, bits: int) -> Array:
    """Return what to take from x so that codes of `bits` bits stand for the rest: the least, but for codes too far."""
    return np.asarray(x - np.clip(np.rint(x / scale), *limits(bits)) * scale)


def _by_channel(scale: Array, x: Array) -> Array:
    """`scale` as it divides x [heads, width]."""
    return scale if scale.size == 1 else scale.reshape(x.shape)


def _grouped(x: Array, groups: int) -> Array:
    """x [n, heads, width] as f32 [groups, n, heads · width / groups]."""
    return np.ascontiguousarray(x.reshape(len(x), groups, -1).transpose(1, 0, 2), np.float32)


class _Seen:
    """Keys and values that the attention `node` stores of texts, and how much errors of it matter.

    To first order an error e of key j changes the output of query i by p_ij (q_i · e) (v_j − o_i), p being the weights
    of attention and o its outputs, one of value j by p_ij e. Errors of different keys and channels are taken for
    independent: the weights below are the sums of squares of these factors over queries and heads.
    """

    def __init__(self, activations: Activations, node: Node, places: Sequence[Array]) -> None:
        self.node, self.attrs = node, node.attrs
        self.kv_heads = int(node.attrs["kv_heads"])
        self._activations, self._places = activations, places

    @property
    def turned(self) -> list[Node]:
        """The rotations of queries and keys by their positions."""
        at = self.node.graph.inputs.get("position_ids")
        return [rope for rope in rotations(self.node) if rope.operand("positions") is at]

    def stored(self, turned: bool) -> list[Stored]:
        """Keys, and where they are apart values; keys also as they are at other places, where any who read them are
        `turned`."""
        moved = self._moved()
        names = [name for name in "qkv" if self.node.operand(name) is not None]
        added = self.node.operand("bias")
        bias = None if added is None else self._read(added)
        values = {name: self._activations(self.node.required(name)) for name in names}
        keys, others = _Collected(), _Collected()
        for i, whole in enumerate(values["k"]):
            q, k = self._queries(values["q"][i]), self._by_head(whole)
            v = k[..., : self.attrs["value_dim"]] if "v" not in values else self._by_head(values["v"][i])
            on_scores, on_outputs = self._effects(q, k, v, None if bias is None else bias[i])
            for at, (queries, stored) in enumerate([(q, k), *([moved[i] if moved else (q, k)] if turned else [])]):
                weight = (on_scores.swapaxes(-1, -2) @ np.square(queries)).sum(2)
                if "v" not in values:
                    weight[..., : v.shape[-1]] += on_outputs[..., None]
                # The first token of a text draws much attention, and stands at its beginning only.
                keys.add(stored, weight, at)
                keys.meet(queries, on_scores)
            others.add(v, on_outputs[..., None])
        return [keys.whole(), others.whole()] if "v" in values else [keys.whole()]

    def _effects(self, q: Array, k: Array, v: Array, bias: Array | None) -> tuple[Array, Array]:
        """Σ over channels of (p_ij (v_j − o_i))² [batch, kv_heads, group, queries, keys], and Σ_i p_ij² [batch,
        kv_heads, keys], for q [batch, kv_heads, group, n, d] and k, v [batch, kv_heads, n, d]."""
        scale = self.attrs["scale"] or q.shape[-1] ** -0.5
        scores = q @ k[:, :, None].swapaxes(-1, -2) * scale
        if (cap := self.attrs["softcap"]) is not None:
            scores = cap * np.tanh(scores / cap)
        if bias is not None:
            full = np.broadcast_to(bias, (bias.shape[0], self.attrs["heads"], *bias.shape[2:]))
            scores = scores + full.reshape(len(full), self.kv_heads, -1, *full.shape[2:])
        at = np.arange(k.shape[2])
        seen = VisibleKeys.of(self.attrs).mask(at[:, None], at[None])
        scores = np.where(seen, scores, -np.inf)
        most = scores.max(-1, keepdims=True)
        most = np.where(np.isfinite(most), most, 0)  # of a row that sees nothing
        p = np.exp(scores - most)
        whole = p.sum(-1, keepdims=True)
        if (sinks := self.node.operand("sinks")) is not None:
            whole += np.exp(self._read(sinks)[0].reshape(1, self.kv_heads, -1, 1, 1) - most)
        p /= np.where(whole == 0, 1, whole)
        o = p @ v[:, :, None]
        apart = np.square(v).sum(-1)[:, :, None, None] - 2 * (o @ v[:, :, None].swapaxes(-1, -2))
        apart += np.square(o).sum(-1)[..., None]
        squares = np.square(p)
        return squares * np.maximum(apart, 0) * scale**2, squares.sum((2, 3))

    def _moved(self) -> list[tuple[Array, Array]]:
        """Queries and keys as they are rotated at other places; none where they are not rotated."""
        if not self.turned:
            return []
        turned = {}
        for rope in self.turned:
            x, table = (self._read(rope.required(name)) for name in ("x", "frequencies"))
            moved = zip(x, self._places, table, strict=True)
            turned[rope.output] = [np.asarray(ops.rope.reference(*given, **rope.attrs)) for given in moved]
        with self._activations.assumed(turned):
            queries, keys = (self._activations(self.node.required(name)) for name in "qk")
        return [(self._queries(q), self._by_head(k)) for q, k in zip(queries, keys, strict=True)]

    def _read(self, value: Value) -> list[Array]:
        """Return `value` for every entry of the texts."""
        if isinstance(value, Param):
            return [value.recipe.evaluate(value.graph.reader)] * len(self._places)
        return self._activations(value)

    def _by_head(self, x: Array) -> Array:
        """Keys or values [batch, n, kv_heads · d] as [batch, kv_heads, n, d]."""
        return x.reshape(*x.shape[:2], self.kv_heads, -1).swapaxes(1, 2).astype(np.float32)

    def _queries(self, x: Array) -> Array:
        """Queries [batch, n, heads · d] as [batch, kv_heads, group, n, d]."""
        apart = x.reshape(*x.shape[:2], self.attrs["heads"], -1).swapaxes(1, 2).astype(np.float32)
        return apart.reshape(len(x), self.kv_heads, -1, *apart.shape[2:])


class _Collected:
    """Collects a `Stored`, text by text."""

    def __init__(self) -> None:
        self._rows, self._weights, self._firsts = list[Array](), list[Array](), list[Array]()
        self._queries: Array | None = None

    def add(self, x: Array, weights: Array, start: int = 0) -> None:
        """Keys or values x [batch, heads, n, d] from token `start` on, with weights [batch, heads, n, d or 1]."""
        self._rows.append(_rows(x[:, :, start:]))
        self._weights.append(_rows(weights[:, :, start:]))
        if not start:
            self._firsts.append(x[:, :, 0])

    def meet(self, queries: Array, on_scores: Array) -> None:
        """Queries [batch, heads, group, n, d] that meet the keys, as much as errors of scores [.., n, keys] matter."""
        weighted = queries * on_scores.sum(-1, keepdims=True)
        moment = (weighted.swapaxes(-1, -2) @ queries).sum((0, 2))
        self._queries = moment if self._queries is None else self._queries + moment

    def whole(self) -> Stored:
        first = np.median(np.concatenate(self._firsts), axis=0)
        return Stored(np.concatenate(self._rows), np.concatenate(self._weights), first, self._queries)


def _rows(x: Array) -> Array:
    """x [batch, heads, n, d] as [batch · n, heads, d]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _places(graph: Graph, texts: Sequence[Array]) -> list[Array]:
    """Positions [texts, length] all over the context: keys are stored as they are rotated, which there reaches where
    first positions do not."""
    context = int(graph.meta.get("context") or CONTEXT)
    starts = iter(np.linspace(0, 1, sum(len(ids) for ids in texts)))
    return [
        np.array([int(next(starts) * max(0, context - ids.shape[1])) + np.arange(ids.shape[1]) for _ in ids])
        for ids in texts
    ]


def without_caches(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """A copy of `graph` that reads texts from their beginning, and its nodes by those of `graph`."""
    copy = graph.clone()
    twins = dict(zip(graph.nodes, copy.nodes, strict=True))
    for name, value in list(copy.outputs.items()):
        if (maker := value.producer) is not None and value is not maker.output and has_state(maker):
            del copy.outputs[name]
    # A mask of past and call is one of the call.
    _rename_size(copy, "total", "seq")
    for node, twin in list(twins.items()):
        if has_state(node):
            twins[node] = _fresh(copy, twin)
    for name, value in list(copy.inputs.items()):
        if not value.uses:
            del copy.inputs[name]
    return copy, twins


def _fresh(graph: Graph, node: Node) -> Node:
    """`node` of a call without a past, in its place."""
    absent = {spec.taken for spec in specs(node)} | {spec.positions for spec in specs(node)}
    given = [None if o.name in absent else v for o, v in zip(node.op.operands, node.inputs, strict=False)]
    attrs = {**node.attrs, **({"rolling": False} if "rolling" in node.attrs else {})}
    with graph.inserting(before=node):
        made = node.op.emit(*given, **attrs)
    node.output.replace_uses(made[0])
    graph.erase(node)
    assert made[0].producer is not None
    return made[0].producer


def _rename_size(graph: Graph, old: str, new: str) -> None:
    binding = {old: sizes.sym(new)}

    def renamed(value: Any) -> Any:
        if isinstance(value, sizes.Poly):
            return sizes.substitute(value, binding)
        return tuple(map(renamed, value)) if isinstance(value, tuple) else value

    values: list[Value] = [*graph.inputs.values(), *(v for node in graph.nodes for v in node.outputs)]
    for value in values:
        value.type = value.type.with_shape(*(renamed(size) for size in value.type.shape))
    for node in graph.nodes:
        node.attrs = {name: renamed(value) for name, value in node.attrs.items()}

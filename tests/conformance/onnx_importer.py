"""One ONNX node as a graph of weft's ops: for the node tests of the onnx package, no importer of models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

from weft.ir import Graph, TensorType, Value, ops
from weft.ir.ops.elementwise import fill_like, mask_fill
from weft.ir.ops.tensor import merge_heads, split_heads
from weft.ir.types import dtypes

Array = np.ndarray[Any, Any]


class InexpressibleError(Exception):
    """Says what of a node weft's ops do not have."""


class Importing:
    """A node on its way into `graph`: inputs by number, attributes by name. Floats of 16 bits are taken in f32."""

    def __init__(self, node: onnx.NodeProto, arrays: Sequence[Array]) -> None:
        self.graph = Graph(node.op_type)
        self.feeds: dict[str, Array] = {}
        self.attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        self.outputs = [bool(name) for name in node.output]
        waiting = iter(arrays)
        self.arrays = [next(waiting) if name else None for name in node.input]
        self.inputs = [None if a is None else self.feed(f"x{i}", a) for i, a in enumerate(self.arrays)]

    def feed(self, name: str, array: Array) -> Value:
        """A graph input of these numbers."""
        kinds = {"b": dtypes.bool_, "i": dtypes.i64}
        dtype = kinds.get(array.dtype.kind, dtypes.f32)
        self.feeds[name] = array.astype(dtype.numpy)
        return self.graph.add_input(name, TensorType(dtype, array.shape))

    def __getitem__(self, i: int) -> Value | None:
        return self.inputs[i] if i < len(self.inputs) else None

    def operands(self, *places: int) -> list[Value]:
        """Inputs that must be there."""
        found = [self[i] for i in places]
        assert None not in found
        return [v for v in found if v is not None]

    def number(self, name: str, default: Any = None) -> Any:
        return self.attrs.get(name, default)

    def text(self, name: str, default: str) -> str:
        value = self.attrs.get(name)
        return default if value is None else value.decode()


def imported(node: onnx.NodeProto, arrays: Sequence[Array]) -> tuple[Graph, dict[str, Array]]:
    """A graph whose outputs y0, y1, … are those of `node` on inputs shaped like `arrays`, and what to feed it.

    Scores, the fourth output of attention, are left out.

    Raises:
        InexpressibleError: if weft's ops do not say what the node says.
    """
    importing = Importing(node, arrays)
    made = RULES[node.op_type](importing)
    for i, (wanted, value) in enumerate(zip(importing.outputs, made, strict=False)):
        if wanted and value is not None:
            importing.graph.add_output(f"y{i}", value)
    return importing.graph, importing.feeds


# -- norms


def _rows(x: Value, axis: int) -> Value:
    """x with the axes from `axis` on joined to one."""
    axis %= len(x.shape)
    return ops.reshape(x, shape=(*x.shape[:axis], math.prod(x.shape[axis:])))


def _rms(node: Importing) -> list[Value]:
    x, weight = node.operands(0, 1)
    y = ops.rms_norm(_rows(x, node.number("axis", -1)), _rows(weight, 0), eps=node.number("epsilon", 1e-5))
    return [ops.reshape(y, shape=x.shape)]


def _layer(node: Importing) -> list[Value]:
    x, weight = node.operands(0, 1)
    axis, eps, shift = node.number("axis", -1) % len(x.shape), node.number("epsilon", 1e-5), node[2]
    rows = _rows(x, axis)
    y = ops.layer_norm(rows, _rows(weight, 0), None if shift is None else _rows(shift, 0), eps=eps)
    mean = ops.mean(rows, axes=(-1,), keepdims=True)
    variance = ops.mean(ops.square(ops.sub(rows, mean)), axes=(-1,), keepdims=True)
    narrow = (*x.shape[:axis], *(1 for _ in x.shape[axis:]))
    statistics = (ops.reshape(v, shape=narrow) for v in (mean, ops.rsqrt(ops.affine(variance, plus=eps))))
    return [ops.reshape(y, shape=x.shape), *statistics]


# -- recurrences


def _linear_attention(node: Importing) -> list[Value]:
    q, k, v = node.operands(0, 1, 2)
    rule, heads = node.text("update_rule", "gated_delta"), node.number("kv_num_heads")
    d = q.width // node.number("q_num_heads")
    past = node[3] or node.feed("past", np.zeros((q.shape[0], heads, d, v.width // heads)))
    scaled = ops.affine(q, by=node.number("scale", 0) or 1 / math.sqrt(d))
    if rule in ("delta", "gated_delta"):
        if node.number("q_num_heads") > heads:
            raise InexpressibleError("several queries of one state")
        (beta,) = node.operands(5)
        beta = ops.expand(beta, shape=(*beta.shape[:2], heads))
        return list(ops.gated_delta_rule.emit(scaled, k, v, beta, node[4], past, heads=heads, groups=heads))
    return list(ops.gated_linear_attention.emit(scaled, k, v, node[4], past, heads=heads, groups=heads))


def _causal_conv(node: Importing) -> list[Value]:
    x, weight = node.operands(0, 1)
    batch, channels, _ = x.shape
    width = weight.width
    if width == 1:
        raise InexpressibleError("a convolution of width 1")
    past = node[3] or node.feed("past", np.zeros((batch, channels, width - 1)))
    turned = (ops.transpose(t, axes=(0, 2, 1)) for t in (x, past))
    x, past = turned
    kernel = ops.reshape(weight, shape=(channels, width))
    activation = {"none": "identity", "swish": "silu"}.get(node.text("activation", "none"), node.text("activation", ""))
    outs = ops.causal_conv.emit(x, kernel, node[2], past, activation=activation)
    return [ops.transpose(t, axes=(0, 2, 1)) for t in outs]


# -- attention


def genuine_tables(arrays: Sequence[Array]) -> list[Array]:
    """The inputs of RotaryEmbedding with cosines and sines in the place of random tables."""
    x, table, _, *positions = arrays
    at = np.arange(table.shape[-2])
    angles = np.broadcast_to(at[:, None] * _frequencies(table), table.shape)
    return [x, np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype), *positions]


def _frequencies(table: Array) -> Array:
    pairs = table.shape[-1]
    frequencies: Array = 0.7 ** np.arange(pairs)
    return frequencies


def _rotary(node: Importing) -> list[Value]:
    """Of `genuine_tables`."""
    (x,), table = node.operands(0), node.arrays[1]
    assert table is not None
    ranked = len(x.shape) == 4
    heads = x.shape[1] if ranked else node.number("num_heads")
    rows = merge_heads(x) if ranked else x
    positions = node[3] or node.feed("positions", np.tile(np.arange(rows.shape[1]), (rows.shape[0], 1)))
    interleaved = bool(node.number("interleaved", 0))
    y = ops.rope(rows, positions, node.feed("frequencies", _frequencies(table)), heads=heads, interleaved=interleaved)
    return [split_heads(y, heads) if ranked else y]


def _attention(node: Importing) -> list[Value | None]:
    q, k, v = node.operands(0, 1, 2)
    ranked = len(q.shape) == 4
    heads = q.shape[1] if ranked else node.number("q_num_heads")
    kv_heads = k.shape[1] if ranked else node.number("kv_num_heads")
    if ranked:
        q, k, v = merge_heads(q), merge_heads(k), merge_heads(v)
    attrs = {
        "heads": heads,
        "kv_heads": kv_heads,
        "causal": bool(node.number("is_causal", 0)),
        "window": _window(node),
        "scale": node.number("scale"),
        "softcap": node.number("softcap", 0.0) or None,
    }
    past, valid = (node[4], node[5]), node[6]
    causal = attrs["causal"] or attrs["window"] is not None
    present: list[Value | None] = [None, None]
    if valid is not None and causal:
        y = _on_static_cache(node, q, k, v, valid, attrs)
    elif past[0] is not None and causal:
        y, *present = _on_growing_cache(node, q, k, v, past, attrs)
    else:
        if past[0] is not None and past[1] is not None:
            present = [ops.concat(old, split_heads(x, kv_heads), axis=2) for old, x in ((past[0], k), (past[1], v))]
            k, v = (merge_heads(x) for x in present)
        keys = k.shape[1]
        shown = None if valid is None else _shorter(node, valid, keys)
        y = ops.attention(q, k, v, _bias(node, keys), shown, **attrs)
    return [split_heads(y, heads) if ranked else y, *present]


def _window(node: Importing) -> int | None:
    left, right = (node.number(f"{side}_window_size", -1) for side in ("left", "right"))
    if left < 0 and right < 0:
        return None
    if right not in (-1, left) or not (node.number("is_causal", 0) or left == right):
        raise InexpressibleError("a window of different width to the left and to the right")
    return int(left) + 1


def _bias(node: Importing, keys: int) -> Value | None:
    """The mask as a bias [batch or 1, heads or 1, queries or 1, keys]; what it does not cover is hidden."""
    mask = node[3]
    if mask is None:
        return None
    mask = ops.reshape(mask, shape=(*(1 for _ in range(4 - len(mask.shape))), *mask.shape))
    if mask.type.dtype == dtypes.bool_:
        mask = mask_fill(mask, fill_like(ops.cast(mask, to=dtypes.f32), 0.0), -math.inf)
    missing = keys - mask.shape[3]
    return ops.pad(mask, axis=3, after=missing, value=-math.inf) if missing else mask


def _shorter(node: Importing, valid: Value, keys: int) -> Value:
    """[batch, keys]: the first `valid` [batch] keys."""
    counted = node.feed("keys", np.arange(keys)[None])
    return ops.less(counted, ops.unsqueeze(valid, axes=(1,)))


def _on_static_cache(node: Importing, q: Value, k: Value, v: Value, valid: Value, attrs: dict[str, Any]) -> Value:
    """Queries at the end of the first `valid` keys of a cache: those keys are taken out of it and written again."""
    seq, kv_heads, lengths = q.shape[1], attrs["kv_heads"], node.arrays[6]
    assert lengths is not None
    if (lengths < seq).any():
        raise InexpressibleError("more queries than keys")
    steps = node.feed("steps", np.arange(-seq, 0)[None])
    at = ops.add(ops.unsqueeze(valid, axes=(1,)), steps)
    fresh = (ops.gather_rows(x, at) for x in (k, v))
    caches = (split_heads(x, kv_heads) for x in (k, v))
    shown = _bias(node, k.shape[1])
    return ops.attention.emit(q, *fresh, shown, None, None, *caches, at, **{**attrs, "causal": True})[0]


def _on_growing_cache(
    node: Importing, q: Value, k: Value, v: Value, past: Sequence[Value | None], attrs: dict[str, Any]
) -> tuple[Value, ...]:
    """Queries behind a past to which their keys are appended: a cache with room for just them."""
    old_k, old_v = past
    assert old_k is not None and old_v is not None
    if q.shape[1] != k.shape[1]:
        raise InexpressibleError("as many queries as new keys are not given")
    first, seq = old_k.shape[2], q.shape[1]
    at = node.feed("at", np.tile(np.arange(first, first + seq), (q.shape[0], 1)))
    caches = (ops.pad(x, axis=2, after=seq) for x in (old_k, old_v))
    bias = _bias(node, first + seq)
    return ops.attention.emit(q, k, v, bias, None, None, *caches, at, **{**attrs, "causal": True})


def _flex(node: Importing) -> list[Value | None]:
    if mods := {"score_mod", "prob_mod"} & node.attrs.keys():
        raise InexpressibleError(f"a {mods.pop()} graph")
    return _attention(node)


RULES: dict[str, Callable[[Importing], Sequence[Value | None]]] = {
    "Attention": _attention,
    "FlexAttention": _flex,
    "RotaryEmbedding": _rotary,
    "RMSNormalization": _rms,
    "LayerNormalization": _layer,
    "LinearAttention": _linear_attention,
    "CausalConvWithState": _causal_conv,
}

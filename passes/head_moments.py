"""What the maps of an attention see on a text: second moments of activations, by which merged heads are weighed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weft.ir import Node, Param, Value
from weft.ir.archive import Array
from weft.ir.interpreter import run_node

from .calibration import Activations
from .projections import Branch, branch_of


@dataclass(frozen=True)
class Moments:
    """Second moments [n, n] of activations, followed by one that is always 1 (for biases), of trace n.

    `q` are of what queries are made of. `k` [groups, n, n], for each new group of heads, are half of what keys are made
    of and half of how it differs among the keys that a query attends to: a part that they share moves no attention.
    `v` [groups, n, n] are half of what values are made of and half of its averages, which is what heads make of values.
    `spread` [heads] is E[Σ_j p_j (1 − p_j)] of a head's attention p: how much it heeds small errors of scores, which is
    little where one key has nearly all of it.
    """

    q: Array
    k: Array
    v: Array
    spread: Array


def moments(node: Node, groups: int, activations: Activations | None) -> Moments:
    """Those of the attention `node`, whose keys and values come from linears; without `activations`, of white noise."""
    heads = int(node.attrs["heads"])
    branches = [branch_of(node, role) for role in "qkv"]
    q, k, v = (b.linear.inputs[0] if isinstance(b, Branch) else None for b in branches)
    assert k is not None and v is not None
    if activations is None:
        eyes = [np.eye(1 if x is None else x.width + 1) for x in (q, k, v)]
        white_k, white_v = (np.stack([eye] * groups) for eye in eyes[1:])
        return Moments(eyes[0], white_k, white_v, np.ones(heads))
    known = {x: activations(x) for x in (q, k, v) if x is not None}
    with activations.aside():
        known |= {x: activations(x) for x in node.inputs if x is not None and not isinstance(x, Param)}
    sums: list[Array] = []
    for i in range(len(known[k])):
        here = {x: arrays[i] for x, arrays in known.items()}
        ones = {x: _with_one(here[x]) for x in (q, k, v) if x is not None}
        for text, p in enumerate(attention_weights(node, here)):
            queries, keys, values = (ones[k if x is None else x][text] for x in (q, k, v))
            part = _sums(p, groups, queries, keys, keys if v is k else values)
            sums = [a + b for a, b in zip(sums, part, strict=True)] if sums else part
    asked, tokens, differing, offered, averaged, spread = sums
    scale = spread.mean() or 1.0
    return Moments(_scaled(asked), _mean(tokens, differing), _mean(offered, averaged), spread / scale + 1e-3)


def attention_weights(node: Node, known: Mapping[Value, Array]) -> Array:
    """What every query of the attention `node` gives every key, [batch, heads, seq, keys], from what it reads."""
    operands = [known[v] if v is not None and v in known else _evaluated(v) for v in node.inputs]
    q, k = operands[:2]
    assert q is not None and k is not None
    batch, keys, _ = k.shape
    marks = np.tile(np.eye(keys, dtype=k.dtype), (batch, 1, node.attrs["kv_heads"]))  # the value of a key is its place
    (found,) = run_node(node.op, [q, k, marks, *operands[3:]], {**node.attrs, "value_dim": None}, {})
    weights: Array = found.reshape(batch, -1, node.attrs["heads"], keys).swapaxes(1, 2)
    return weights


def _evaluated(value: Value | None) -> Array | None:
    return value.recipe.evaluate(value.graph.archive) if isinstance(value, Param) else None


def _with_one(x: Array) -> Array:
    return np.concatenate([x, np.ones((*x.shape[:-1], 1), x.dtype)], -1)


def _sums(p: Array, groups: int, queries: Array, keys: Array, values: Array) -> list[Array]:
    """Of one text with attention weights `p` [heads, seq, keys]: squares of queries, keys, differences of keys within
    an attention, values, averages of values; and how far the weights are spread."""
    mass = p.reshape(groups, -1, len(keys)).sum(1)[:, None]  # [groups, 1, keys]
    means = _averaged(p, groups, keys)
    averaged = means if values is keys else _averaged(p, groups, values)
    products = [_squares(queries), _squares(keys), (keys.T * mass) @ keys - means, _squares(values), averaged]
    return [x.astype(np.float64) for x in (*products, (p * (1 - p)).sum((1, 2)))]


def _squares(x: Array) -> Array:
    found: Array = x.swapaxes(-1, -2) @ x
    return found


def _averaged(p: Array, groups: int, x: Array) -> Array:
    """Squares of the averages of `x` [keys, n] that the heads of each group take: [groups, n, n]."""
    return _squares((p @ x).reshape(groups, -1, x.shape[1]))


def _scaled(moment: Array) -> Array:
    """`moment` [..., n, n] with trace n."""
    trace = np.trace(moment, axis1=-2, axis2=-1)[..., None, None]
    return np.asarray(moment * (moment.shape[-1] / np.where(trace > 0, trace, 1)))


def _mean(one: Array, groups: Array) -> Array:
    """Half of `one` [n, n] with half of each of `groups` [groups, n, n]."""
    return (_scaled(one) + _scaled(groups)) / 2

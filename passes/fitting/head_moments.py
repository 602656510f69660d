"""Second moments of an attention's activations on calibration sequences, which weight the errors of merged heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weft.ir import Node, Param, Value
from weft.ir.interpreter import run_node
from weft.ir.recipes.readers import Array

from ..analysis.projections import Branch, find_branch
from .calibration import Activations


@dataclass(frozen=True)
class Moments:
    """Second moments [n, n] of activations with a constant 1 appended (for biases), scaled to trace n.

    q: [n, n], of the inputs of the query linear.
    k: [groups, n, n], one per new KV head: the mean of two moments, of the key linear's inputs and of their deviations
        from the attention-weighted average, since a part that all keys share does not change the attention.
    v: [groups, n, n]: the mean of two moments, of the value linear's inputs and of their attention-weighted averages.
    spread: [heads], E[Σ_j p_j (1 − p_j)] of attention weights p, relative to its mean: the sensitivity to errors of
        scores, which is low if one key has nearly all weight.
    """

    q: Array
    k: Array
    v: Array
    spread: Array


def compute_moments(node: Node, groups: int, activations: Activations | None) -> Moments:
    """Return the moments of the attention `node`, for `groups` new KV heads, on the sequences of `activations`.

    Linears must compute k and v. If `activations` is None, all moments are identities, and `spread` is 1.
    """
    heads = int(node.attrs["heads"])
    branches = [find_branch(node, role) for role in "qkv"]
    q, k, v = (b.linear.inputs[0] if isinstance(b, Branch) else None for b in branches)
    assert k is not None and v is not None
    if activations is None:
        eyes = [np.eye(1 if x is None else x.width + 1) for x in (q, k, v)]
        white_k, white_v = (np.stack([eye] * groups) for eye in eyes[1:])
        return Moments(eyes[0], white_k, white_v, np.ones(heads))
    values = {x: activations(x) for x in (q, k, v) if x is not None}
    with activations.override():
        values |= {x: activations(x) for x in node.inputs if x is not None and not isinstance(x, Param)}
    tokens, averaged = dict[Value, Array](), dict[Value, Array]()
    attended: Array = np.zeros(())
    spread = np.zeros(heads)
    for i in range(len(values[k])):
        batch = {x: arrays[i] for x, arrays in values.items()}
        p = compute_attention_weights(node, batch)
        # p (1 − p) is the derivative of a softmax weight by its own score.
        spread += (p * (1 - p)).sum((0, 2, 3))
        for x in {x for x in (q, k, v) if x is not None}:
            ones = np.pad(batch[x], ((0, 0), (0, 0), (0, 1)), constant_values=1)
            tokens[x] = tokens.get(x, 0) + _sum_squares(ones.reshape(-1, ones.shape[-1]))
            if x in (k, v):
                averaged[x] = averaged.get(x, 0) + _sum_squares(_group_heads(p @ ones[:, None], groups))
            if x is k:
                mass = p.sum(2).reshape(len(p), groups, -1, p.shape[3]).sum(2)[..., None]
                # The attention that each key gets: √, because `_sum_squares` multiplies each vector with itself.
                attended = attended + _sum_squares(_group_heads(np.sqrt(mass) * ones[:, None], groups))
    queries = np.eye(1) if q is None else _normalize_trace(tokens[q])
    scale = spread.mean() or 1.0
    return Moments(
        queries,
        # E[x xᵀ] − E[x] E[x]ᵀ under the attention: how keys differ from the mean key.
        _average_moments(tokens[k], attended - averaged[k]),
        _average_moments(tokens[v], averaged[v]),
        # The floor keeps a weight for heads that attend to a single key.
        spread / scale + 1e-3,
    )


def compute_attention_weights(node: Node, values: Mapping[Value, Array]) -> Array:
    """Return the attention weights [batch, heads, seq, keys] of `node`, from the `values` of its operands."""
    params: dict[Value, Array] = {v: v.recipe.evaluate(v.graph.reader) for v in node.inputs if isinstance(v, Param)}
    arrays = params | dict(values)
    operands = [None if v is None else arrays.get(v) for v in node.inputs]
    q, k = operands[:2]
    assert q is not None and k is not None
    batch, keys, _ = k.shape
    # The value of a key is the one-hot vector of its index.
    one_hot = np.tile(np.eye(keys, dtype=k.dtype), (batch, 1, node.attrs["kv_heads"]))
    (outputs,) = run_node(node.op, [q, k, one_hot, *operands[3:]], {**node.attrs, "value_dim": None}, {})
    return np.asarray(outputs.reshape(batch, -1, node.attrs["heads"], keys).swapaxes(1, 2))


def _group_heads(x: Array, groups: int) -> Array:
    """Return `x` [batch, heads, seq, n] as [groups, vectors, n], the heads split into `groups` of adjacent ones."""
    return np.moveaxis(x.reshape(len(x), groups, -1, x.shape[-1]), 1, 0).reshape(groups, -1, x.shape[-1])


def _sum_squares(x: Array) -> Array:
    """Return Σ v vᵀ [..., n, n] over the vectors v of `x` [..., vectors, n], summed in the dtype of `x`, as float64."""
    # float64: these are summed over the whole text.
    return (x.swapaxes(-1, -2) @ x).astype(np.float64)


def _normalize_trace(moment: Array) -> Array:
    trace = np.trace(moment, axis1=-2, axis2=-1)[..., None, None]
    return np.asarray(moment * (moment.shape[-1] / np.where(trace > 0, trace, 1)))


def _average_moments(common: Array, groups: Array) -> Array:
    """Return the mean of `common` [n, n] and each matrix of `groups` [groups, n, n], all scaled to trace n."""
    return (_normalize_trace(common) + _normalize_trace(groups)) / 2

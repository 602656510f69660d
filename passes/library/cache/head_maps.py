"""Exact maps of keys and values, by which codes of few bits lose less.

Keys k are stored as (k − c) T, and met by queries q T⁻ᵀ: the product is q · k − q · c, and softmax does not see what
all scores of a query share. Values v are stored as (v − c) R with an orthogonal R, and the output o becomes o Rᵀ + c,
as the weights of attention sum to 1. c and T are those of a KV head.

Source: Liu 2024, KIVI (arXiv 2402.02750), on outliers in the channels of keys; Ashkboos 2024, QuaRot (arXiv
2404.00456), on rotations behind RoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from weft.ir import Node, Param, Value, ops
from weft.ir.recipes import Permute
from weft.ir.recipes.matrices import Inverse, RandomOrthogonal
from weft.ir.recipes.readers import EMPTY, Array

from ...edits.edit import scoped

RIDGE = 1e-4  # of the mean of a moment's diagonal, added to it
SEED = 1


@dataclass(frozen=True)
class HeadMap:
    """x → (x − shift) matrix, for x [.., kv_heads, width]: shift [kv_heads, width] or None, matrix [kv_heads, width,
    width], or [width, width] of all heads."""

    shift: Array | None
    matrix: Array

    def __call__(self, x: Array) -> Array:
        centred = x if self.shift is None else x - self.shift
        return np.asarray((centred[..., None, :] @ self.matrix)[..., 0, :])

    def moved(self, left: Array) -> HeadMap:
        """Return this map, but for `left` [kv_heads, width], which is taken from all that it makes."""
        assert self.shift is not None
        shift = self.shift + (left[..., None, :] @ np.linalg.inv(self.matrix))[..., 0, :]
        return HeadMap(shift.astype(np.float32), self.matrix)


def rotation(width: int) -> RandomOrthogonal:
    """The orthogonal matrix [width, width] that spreads every channel over all."""
    return RandomOrthogonal(width, SEED)


def balanced(keys: Array, queries: Array) -> Array:
    """T [heads, width, width] for keys and queries with the second moments `keys` and `queries` [heads, width, width].

    Rounding channel c of k T to steps as wide as its numbers costs E[(k T)²_c] E[(q T⁻ᵀ)²_c]. Where both moments are
    the same diagonal D the sum of that over channels is Σ D², and where a rotation has made all places of D equal,
    (Σ D)² / width, the least there is.
    """
    found = []
    for key, query in zip(keys.astype(np.float64), queries.astype(np.float64), strict=True):
        key, query = (m + RIDGE * max(np.trace(m) / len(m), 1e-12) * np.eye(len(m)) for m in (key, query))
        root = np.linalg.cholesky(key)
        shared, turned = np.linalg.eigh(root.T @ query @ root)
        # L⁻ᵀ U makes the moment of keys the identity and that of queries `shared`; its root is for both.
        found.append(np.linalg.inv(root).T @ turned * shared**0.25)
    matrices: Array = np.stack(found) @ rotation(keys.shape[-1]).evaluate(EMPTY)
    return matrices


def insert(nodes: Sequence[Node], keys: HeadMap, values: HeadMap, keep: Callable[[str, Array], Param]) -> None:
    """Map the keys and values that all of the attentions `nodes` read, their queries, and what they make.

    `keep` makes a parameter of numbers, named after what they are.
    """
    first = nodes[0]
    graph, kv_heads = first.graph, int(first.attrs["kv_heads"])
    with graph.inserting(before=first):
        forth, turn = keep("k_map", keys.matrix), rotation(len(values.matrix))
        against, to, back = (
            graph.add_param(scoped(graph, name), forth.type.with_shape(*matrix.shape), recipe)
            for name, matrix, recipe in (
                ("q_map", keys.matrix, Permute(Inverse(forth.recipe), (0, 2, 1))),
                ("v_map", values.matrix, turn),
                ("o_map", values.matrix, Permute(turn, (1, 0))),
            )
        )
        without, behind = (
            None if shift is None else keep(name, shift[:, None])
            for name, shift in (("k_shift", keys.shift), ("v_shift", values.shift))
        )
        kept = []
        for name, shift, matrix in (("k", without, forth), ("v", behind, to)):
            value = first.required(name)
            x = _apart(value, kv_heads, kv_heads)
            kept.append(_joined(ops.matmul(x if shift is None else ops.sub(x, shift), matrix), value))
    for node in nodes:
        heads, q = int(node.attrs["heads"]), node.required("q")
        with graph.inserting(before=node):
            node.set_input(0, _joined(ops.matmul(_apart(q, heads, kv_heads), against), q))
        for index, value in enumerate(kept, 1):
            node.set_input(index, value)
        with graph.inserting(after=node):
            apart = _apart(node.output, heads, kv_heads)
            y = ops.matmul(apart, back)
            made = _joined(y if behind is None else ops.add(y, behind), node.output)
            assert apart.producer is not None
            node.output.replace_uses(made, keep=[apart.producer])


def _apart(x: Value, heads: int, kv_heads: int) -> Value:
    """x [batch, seq, heads · width] as [batch, seq, kv_heads, heads / kv_heads, width]."""
    return ops.reshape(x, shape=(*x.shape[:2], kv_heads, heads // kv_heads, x.width // heads))


def _joined(x: Value, like: Value) -> Value:
    """The inverse of `_apart`."""
    return ops.reshape(x, shape=like.shape)

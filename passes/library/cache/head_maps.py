"""Exact linear maps of keys and values that reduce the error of rounding them to 4 bits.

Keys k are stored as (k − c) T and multiplied by queries q T⁻ᵀ: the product is q · k − q · c, and softmax ignores the
term that all scores of a query share. Values v are stored as (v − c) R with an orthogonal R, and the output o becomes
o Rᵀ + c, since attention weights sum to 1. Each KV head has its own c and T.

Source: Liu 2024, KIVI (arXiv 2402.02750), on outliers in the channels of keys; Ashkboos 2024, QuaRot (arXiv
2404.00456), on rotations after RoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from weft.ir import Node, Param, Value, ops
from weft.ir.recipes import Permute
from weft.ir.recipes.matrices import Inverse, RandomOrthogonal
from weft.ir.recipes.readers import EMPTY, Array

from ...edits.edit import add_scope

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

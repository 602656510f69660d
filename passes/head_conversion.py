"""Fewer key and value heads in closed form: the linear algebra, on arrays, without a graph.

What a head computes does not tell its weights: any invertible A between values and outputs (V → A V, O → O A⁻¹), and
between queries and keys where nothing rotates them, leaves it as it is, so that averages of weights mix what has no
common basis. The truncated singular value decompositions here do not depend on it, and where the heads that become one
are the same head in different bases, they are exact. They weigh errors by the second moments E[x xᵀ] = L Lᵀ of the
activations that the maps are for.

All arrays are float64; a bias is a last column, for an activation that is always 1.
"""

from __future__ import annotations

import numpy as np

from weft.ir.archive import Array

RIDGE = 1e-4  # added to second moments, relative to their mean: directions that calibration hardly saw keep a weight


def whiten(moment: Array) -> tuple[Array, Array]:
    """L and L⁻¹ with L Lᵀ = `moment` [n, n], regularized."""
    n = len(moment)
    scale = np.trace(moment) / n or 1.0
    values, vectors = np.linalg.eigh(moment / scale + RIDGE * np.eye(n))
    root = np.sqrt(np.maximum(values, RIDGE) * scale)
    return vectors * root, (vectors / root).T


def shared_rows(products: list[Array], members: list[Array], moment: Array) -> tuple[Array, list[Array]]:
    """One map B [d, n] for several `members` W_m [d, n], and A_m [d, d] with A_m B ≈ W_m.

    The sum over m of E[tr(P_m (W_m x − A_m B x)(W_m x − A_m B x)ᵀ)] is the least possible: `products` P_m [d, d] are
    what the rest of the head weighs errors with (Oᵀ O summed over the heads that read m for values, E[q qᵀ] for keys).
    The rows of B are orthonormal.
    """
    d = len(members[0])
    root, inverse = whiten(moment)
    white = [w @ root for w in members]
    gram = sum(w.T @ p @ w for w, p in zip(white, products, strict=True))
    top = np.linalg.eigh(gram)[1][:, : -d - 1 : -1].T  # [d, n], orthonormal, the largest first
    basis, mixed = np.linalg.qr((top @ inverse).T)
    return basis.T, [w @ top.T @ mixed.T for w in white]


def shared_pairs(energies: Array, members: Array, moment: Array) -> tuple[Array, Array]:
    """The same for rows that come in pairs which rotary positions turn, as complex rows: B [pairs, n] for `members`
    [members, pairs, n], and factors a [members, pairs] with a_m B ≈ W_m.

    Of all maps only complex factors commute with the rotation. `energies` [members, pairs] are E|q|² of the queries
    that meet each.
    """
    root, inverse = whiten(moment)
    white = members @ root  # [m, pairs, n]
    strong = np.moveaxis(white * np.sqrt(energies)[..., None], 1, 0)  # [pairs, m, n]
    left = np.linalg.eigh(strong @ strong.conj().swapaxes(1, 2))[1][..., -1]  # [pairs, m]
    top = np.einsum("pm,pmn->pn", left.conj(), strong)
    top /= np.maximum(np.linalg.norm(top, axis=1, keepdims=True), np.finfo(float).tiny)
    basis = top @ inverse
    factors = np.einsum("mpn,pn->mp", white, top.conj())
    length = np.linalg.norm(basis, axis=1)
    length[length == 0] = 1
    return basis / length[:, None], factors * length

"""Merge key and value heads in closed form: linear algebra on arrays, without a graph.

The function of a head does not determine its weights: any invertible A between values and outputs (V → A V, O → O A⁻¹),
and between queries and keys without RoPE, leaves it unchanged. Averages of weights therefore mix vectors in different
bases. The truncated singular value decompositions here are independent of the basis, and exact if the merged heads are
the same head in different bases. They weight errors by the second moments E[x xᵀ] = L Lᵀ of the activations x that the
maps multiply.

All arrays are float64; a bias is a last column, for an activation that is always 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.ir.recipes.readers import Array

from .head_moments import Moments

RIDGE = 1e-4  # added to the diagonal of moments, relative to its mean: directions that are rare keep a weight


def compute_whitening(moment: Array) -> tuple[Array, Array]:
    """Return (L, L⁻¹), both [n, n], for which L Lᵀ is `moment` [n, n] plus `RIDGE` times its mean diagonal."""
    n = len(moment)
    scale = np.trace(moment) / n or 1.0
    values, vectors = np.linalg.eigh(moment / scale + RIDGE * np.eye(n))
    # Rounding can leave eigenvalues below the ridge that was added.
    root = np.sqrt(np.maximum(values, RIDGE) * scale)
    # L = V √Λ with orthogonal V, so L⁻¹ = (V / √Λ)ᵀ.
    return vectors * root, (vectors / root).T


def _compute_root(product: Array) -> Array:
    """Return R [n, n] with R Rᵀ = `product` [n, n], which is positive semidefinite."""
    values, vectors = np.linalg.eigh(product)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0)))


def fit_shared_rows(products: list[Array], members: list[Array], moment: Array, rank: int) -> tuple[Array, list[Array]]:
    """Return (B, [A_m]): B [rank, n] with orthonormal rows and an A_m [d, rank] for each W_m of `members` [d, n], whose
    d may differ; A_m B ≈ W_m.

    They minimize the sum over m of E[eᵀ P_m e] for e = W_m x − A_m B x, where x has the second `moment` [n, n].
    `products` are P_m [d, d]: for values, Oᵀ O summed over the heads that read m; for keys, E[q qᵀ].
    """
    root, inverse = compute_whitening(moment)
    white = [w @ root for w in members]
    # Far fewer rows than n.
    weighed = np.concatenate([_compute_root(p).T @ w for w, p in zip(white, products, strict=True)])
    top = np.linalg.svd(weighed, full_matrices=False)[2][:rank]  # orthonormal, the largest first
    # QR moves the lengths of B's rows into the A_m, so that the rows of B are orthonormal.
    basis, mixed = np.linalg.qr((top @ inverse).T)
    return basis.T, [w @ top.T @ mixed.T for w in white]


def fit_shared_pairs(energies: Array, members: Array, moment: Array) -> tuple[Array, Array]:
    """Return (B, a) for the `members` W [members, pairs, n]: B [pairs, n], a [members, pairs], and a_m ⊙ B ≈ W_m.

    Arrays are complex: a row is a pair of RoPE as a complex number, and only complex factors commute with the rotation.
    `energies` [members, pairs] are the E|q|² of the queries that multiply each pair; `moment` [n, n] is E[x xᵀ].
    """
    root, inverse = compute_whitening(moment)
    white = members @ root  # [m, pairs, n]
    strong = np.moveaxis(white * np.sqrt(energies)[..., None], 1, 0)  # [pairs, m, n]
    # The Gram matrix over members is used because members are few and n is large: [m, m], not [n, n].
    basis = np.linalg.eigh(strong @ strong.conj().swapaxes(1, 2))[1][..., -1]  # [pairs, m]
    top = (basis.conj()[:, None] @ strong)[:, 0]
    top /= np.maximum(np.linalg.norm(top, axis=1, keepdims=True), np.finfo(float).tiny)
    basis = top @ inverse
    factors = (white[..., None, :] @ top.conj()[..., None])[..., 0, 0]
    length = np.linalg.norm(basis, axis=1)
    length[length == 0] = 1
    return basis / length[:, None], factors * length


@dataclass(frozen=True)
class Rotation:
    """The rotary features of a head, its first 2·`pairs`; a pair is adjacent if `interleaved`, else p and p + pairs.
    `amplitude` multiplies the products of rotated queries and keys."""

    pairs: int
    interleaved: bool
    amplitude: float = 1.0

    def parts(self, d: int) -> tuple[Array, Array, Array]:
        """Return the indices (of real parts, of imaginary parts, of unrotated features) of a head of `d` features."""
        rotary = np.arange(2 * self.pairs)
        real, imaginary = (rotary[0::2], rotary[1::2]) if self.interleaved else np.split(rotary, 2)
        return real, imaginary, np.arange(2 * self.pairs, d)


def merge_keys(
    q: Array, k: Array, groups: int, q_moment: Array, k_moments: Array, spread: Array, rotation: Rotation
) -> tuple[Array, Array]:
    """Return query maps [heads, d, n] and key maps [groups, d, m] that replace `q` [heads, d, n], `k` [kv_heads, d, m].

    They minimize the squared errors of scores, weighted by `spread` [heads], assuming that the inputs of queries and of
    keys are independent and have the second moments `q_moment` [n, n] and `k_moments` [groups, m, m].
    """
    heads, d, _ = q.shape
    real, imaginary, rest = rotation.parts(d)
    readers = np.arange(heads).reshape(len(k), -1)  # of each old key head
    new_q, new_k = np.empty_like(q), np.empty((groups, *k.shape[1:]))
    complex_q, complex_k = q[:, real] + 1j * q[:, imaginary], k[:, real] + 1j * k[:, imaginary]
    energies = np.einsum("hpn,nm,hpm->hp", complex_q, q_moment, complex_q.conj(), optimize=True).real * spread[:, None]
    for g, members in enumerate(np.split(np.arange(len(k)), groups)):
        basis, factors = fit_shared_pairs(energies[readers[members]].sum(1), complex_k[members], k_moments[g])
        new_k[g, real], new_k[g, imaginary] = basis.real, basis.imag
        for m, factor in zip(members, factors, strict=True):
            # q · conj(a b) = (q · conj(a)) · conj(b): the factor of a key moves to its queries.
            rotated = complex_q[readers[m]] * factor.conj()[:, None]
            new_q[np.ix_(readers[m], real)], new_q[np.ix_(readers[m], imaginary)] = rotated.real, rotated.imag
        if not len(rest):
            continue
        unrotated = [np.sqrt(spread[readers[m], None, None]) * q[readers[m]][:, rest] for m in members]
        products = [(s @ q_moment @ s.swapaxes(1, 2)).sum(0) for s in unrotated]
        rows, maps = fit_shared_rows(products, [k[m, rest] for m in members], k_moments[g], len(rest))
        new_k[g, rest] = rows
        for m, a in zip(members, maps, strict=True):
            new_q[np.ix_(readers[m], rest)] = a.T @ q[readers[m]][:, rest]
    return new_q, new_k


def merge_values(v: Array, o: Array, groups: int, moments: Array) -> tuple[Array, Array]:
    """Return value maps [groups, d, n] and output maps [heads, out, d] that replace `v` [kv_heads, d, n] and `o`.

    They minimize the squared errors of each head's output; `moments` [groups, n, n] are `Moments.v` of `head_moments`.
    """
    readers = np.arange(len(o)).reshape(len(v), -1)
    new_v, new_o = np.empty((groups, *v.shape[1:])), np.empty_like(o)
    for g, members in enumerate(np.split(np.arange(len(v)), groups)):
        products = [(o[readers[m]].swapaxes(1, 2) @ o[readers[m]]).sum(0) for m in members]
        new_v[g], maps = fit_shared_rows(products, [v[m] for m in members], moments[g], v.shape[1])
        for m, a in zip(members, maps, strict=True):
            new_o[readers[m]] = o[readers[m]] @ a
    return new_v, new_o


def compress_to_latent(
    q: Array, k: Array, v: Array, o: Array, rank: int, pairs: Array, rotation: Rotation, moments: Moments
) -> dict[str, Array]:
    """Return the maps of a latent attention with `rank` that replaces `q` [heads, d, n], `k` [kv_heads, d, n], `v`
    [kv_heads, dv, n] and `o` [heads, out, dv].

    The rotary `pairs` stay rotated, in keys that all heads share (`merge_keys`); all other pairs stop to
    rotate. The latent is the best common basis of the unrotated keys and the values, whose errors are weighted by
    their effect on scores and on outputs, both scaled to the same sum.

    Maps, by name: q [heads, d − r, n] and q_rope [heads, r, n] with r = 2·len(pairs); k_rope [1, r, n]; latent
    [1, rank, n]; k_up [kv_heads, d − r, rank] and v_up [kv_heads, dv, rank].
    """
    real, imaginary, rest = rotation.parts(q.shape[1])
    freed = np.concatenate([np.delete(real, pairs), np.delete(imaginary, pairs)])
    rest, q = np.sort(np.concatenate([rest, freed])), q.copy()
    q[:, freed] *= rotation.amplitude
    shared = Rotation(len(pairs), rotation.interleaved)
    rotary = np.empty(2 * len(pairs), int)
    rotary[shared.parts(len(rotary))[0]], rotary[shared.parts(len(rotary))[1]] = real[pairs], imaginary[pairs]
    q_moment = moments.q[: q.shape[2], : q.shape[2]]
    k_moment, v_moment = (m[0, : k.shape[2], : k.shape[2]] for m in (moments.k, moments.v))
    q_rope, k_rope = merge_keys(q[:, rotary], k[:, rotary], 1, q_moment, k_moment[None], moments.spread, shared)
    scaled = (np.sqrt(moments.spread)[:, None, None] * q[:, rest]).reshape(len(k), -1, *q[:, rest].shape[1:])
    kinds = [
        ((scaled @ q_moment @ scaled.swapaxes(2, 3)).sum(1), k[:, rest], k_moment),
        ((o.swapaxes(1, 2) @ o).reshape(len(v), -1, *o.shape[2:], o.shape[2]).sum(1), v, v_moment),
    ]
    products, members = list[Array](), list[Array]()
    for weights, maps, moment in kinds:
        # The sum of the squared effects of all rows.
        total = np.einsum("mij,mjn,np,mip->", weights, maps, moment, maps, optimize=True) or 1.0
        products += list(weights / total)
        members += list(maps)
    latent, ups = fit_shared_rows(products, members, (k_moment + v_moment) / 2, rank)
    k_up, v_up = np.stack(ups[: len(k)]), np.stack(ups[len(k) :])
    return {"q": q[:, rest], "q_rope": q_rope, "k_rope": k_rope, "latent": latent[None], "k_up": k_up, "v_up": v_up}

"""Merged keys, values and queries: no other maps make smaller errors."""

from __future__ import annotations

import numpy as np
import pytest

from weft.passes.fitting.head_conversion import Rotation, merge_keys, merge_values

from .head_graphs import RNG, D


def test_values_are_the_truncated_svd_of_whitened_outputs_and_values() -> None:
    """Against numpy's SVD of the stack O_h V_h L; any factorization of it is as good."""
    rng = RNG(5)
    v, o, x = rng.standard_normal((3, D, 12)), rng.standard_normal((6, 9, D)), rng.standard_normal((400, 12))
    x[:, 3] *= 20
    moment = x.T @ x / 400
    new_v, new_o = merge_values(v, o, 1, moment[None])
    values, vectors = np.linalg.eigh(moment)
    root = vectors * np.sqrt(values)
    stack = np.concatenate([o[h] @ v[h // 2] @ root for h in range(6)])
    left, strength, right = np.linalg.svd(stack, full_matrices=False)
    best = (left[:, :D] * strength[:D]) @ right[:D]
    found = np.concatenate([new_o[h] @ new_v[0] @ root for h in range(6)])
    lost = np.sqrt((strength[D:] ** 2).sum())
    assert np.linalg.norm(found - best) <= 1e-2 * lost  # up to the ridge
    assert lost <= np.linalg.norm(found - stack) <= 1.0001 * lost
    assert np.linalg.norm(stack - np.concatenate([o[h] @ v.mean(0) @ root for h in range(6)])) > 1.5 * lost


@pytest.mark.parametrize("pairs", [0, 2, 4])
def test_no_other_keys_make_smaller_errors(pairs: int) -> None:
    """E[(s − s')²] of scores of independent queries and keys, over all rotations, is a minimum: small changes of the
    weights only enlarge it."""
    rng = RNG(6)
    q, k, n = rng.standard_normal((4, D, 10)), rng.standard_normal((4, D, 9)), 50
    xq, xk = (
        rng.standard_normal((n, 10)) * np.linspace(0.3, 2, 10),
        rng.standard_normal((n, 9)) * np.linspace(2, 0.2, 9),
    )
    spread = np.array([1.0, 0.5, 2.0, 0.1])
    real, imaginary, rest = Rotation(pairs, False).parts(D)

    def loss(new_q: np.ndarray, new_k: np.ndarray) -> float:
        total = 0.0
        for h in range(4):
            a, b, c, d = q[h] @ xq.T, k[h] @ xk.T, new_q[h] @ xq.T, new_k[0] @ xk.T
            still = a[rest].T @ b[rest] - c[rest].T @ d[rest]
            error = (still**2).sum()
            for i, j in zip(real, imaginary, strict=True):  # over a turn, Re(z e^iθ)² is |z|²/2
                z = np.outer(a[i] + 1j * a[j], (b[i] + 1j * b[j]).conj())
                z -= np.outer(c[i] + 1j * c[j], (d[i] + 1j * d[j]).conj())
                error += (np.abs(z) ** 2).sum() / 2
            total += spread[h] * error
        return float(total)

    moments = xq.T @ xq / n, (xk.T @ xk / n)[None]
    found = merge_keys(q, k, 1, *moments, spread, Rotation(pairs, False))
    least = loss(*found)
    for scale in (1e-2, 1e-1):
        for _ in range(20):
            moved = [m + scale * rng.standard_normal(m.shape) * np.abs(m).mean() for m in found]
            assert loss(*moved) > least
    assert loss(q, k.mean(0, keepdims=True)) > 1.3 * least

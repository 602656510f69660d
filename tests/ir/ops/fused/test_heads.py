"""Queries, keys and values with norms and RoPE, against NumPy with complex numbers."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import WeftError, ops
from weft.ir.op import OPS, case, normal
from weft.ir.recipes.readers import Array
from weft.ir.testing import build_node_graph

RNG = np.random.default_rng(3)
B, S, HEADS, KV, D, WIDTH = 2, 3, 4, 2, 4, 8


def rms(x: Array, eps: float) -> Array:
    normed: Array = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
    return normed


def rotate(x: Array, angles: Array, heads: int) -> Array:
    """Rotate the halves of the heads of x as complex numbers by `angles` [batch, seq, pairs]."""
    y = x.reshape(*x.shape[:2], heads, 2, -1)
    z = (y[..., 0, :] + 1j * y[..., 1, :]) * np.exp(1j * angles[:, :, None])
    return np.stack([z.real, z.imag], -2).reshape(x.shape)


def test_rotary_angles_are_cosines_and_sines_of_positions_times_frequencies() -> None:
    positions, frequencies = np.array([[0, 1, 5]]), np.array([1.0, 0.1])
    cosines, sines = OPS["rotary_angles"].run_reference([positions, frequencies], {"amplitude": 1.5})
    angles = np.array([[[0, 0], [1, 0.1], [5, 0.5]]])
    np.testing.assert_allclose([cosines, sines], [1.5 * np.cos(angles), 1.5 * np.sin(angles)])


def test_norm_qkv_normalizes_projects_and_rotates() -> None:
    x, weight, bias = RNG.standard_normal((B, S, WIDTH)), RNG.standard_normal((32, WIDTH)), RNG.standard_normal(32)
    gains = RNG.standard_normal(WIDTH), RNG.standard_normal(D), RNG.standard_normal(D)
    angles = RNG.standard_normal((B, S, D // 2))
    operands = [x, weight, bias, gains[0], None, *gains[1:], np.cos(angles), np.sin(angles)]
    attrs = {"heads": HEADS, "kv_heads": KV, "eps": 0.1, "head_norm": True, "head_eps": 0.2}
    found = OPS["norm_qkv"].run_reference(operands, OPS["norm_qkv"].check_attrs(attrs))
    q, k, v = np.split(rms(x, 0.1) * gains[0] @ weight.T + bias, [16, 24], -1)
    for result, y, gain, heads in ((found[0], q, gains[1], HEADS), (found[1], k, gains[2], KV)):
        normed = (rms(y.reshape(B, S, heads, D), 0.2) * gain).reshape(y.shape)
        np.testing.assert_allclose(result, rotate(normed, angles, heads), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(found[2], v, rtol=1e-11, atol=1e-13)


def test_norm_qkv_refuses_rows_that_are_not_equal_heads() -> None:
    with pytest.raises(WeftError, match=r"has no 4 \+ 2·2 equal heads"):
        build_node_graph(ops.norm_qkv, case(normal(2, 3, 8), normal(30, 8), heads=4, kv_heads=2))


def test_latent_qk_gives_the_scores_of_expanded_keys() -> None:
    heads, plain, rope, rank = 2, 3, 4, 5
    q = RNG.standard_normal((B, S, heads * (plain + rope)))
    latent, weight = RNG.standard_normal((B, S, rank + rope)), RNG.standard_normal((heads * plain, rank))
    angles = RNG.standard_normal((B, S, rope // 2))
    attrs = OPS["latent_qk"].check_attrs({"heads": heads, "eps": 0.1})
    found, key = OPS["latent_qk"].run_reference([q, latent, weight, np.cos(angles), np.sin(angles)], attrs)
    c, shared = rms(latent[..., :rank], 0.1), rotate(latent[..., rank:], angles, 1)
    np.testing.assert_allclose(key, np.concatenate([c, shared], -1), rtol=1e-11, atol=1e-13)
    for h in range(heads):
        own = q.reshape(B, S, heads, -1)[:, :, h]
        expanded = np.concatenate([c @ weight.reshape(heads, plain, rank)[h].T, shared], -1)
        rotated = np.concatenate([own[..., :plain], rotate(own[..., plain:], angles, 1)], -1)
        scores = found.reshape(B, S, heads, -1)[:, :, h] @ key.swapaxes(1, 2)
        np.testing.assert_allclose(scores, rotated @ expanded.swapaxes(1, 2), rtol=1e-11, atol=1e-12)

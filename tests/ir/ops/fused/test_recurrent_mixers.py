"""Fused recurrences against loops over tokens in NumPy."""

from __future__ import annotations

import numpy as np

from weft.ir.op import OPS
from weft.ir.recipes.readers import Array

RNG = np.random.default_rng(6)
B, S = 2, 5


def softplus(x: Array) -> Array:
    return np.logaddexp(0, x)


def silu(x: Array) -> Array:
    gated: Array = x / (1 + np.exp(-x))
    return gated


def rms(x: Array, eps: float) -> Array:
    normed: Array = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
    return normed


def test_gated_selective_scan_is_a_mamba_layer() -> None:
    channels, states = 4, 3
    x, delta, gate = RNG.standard_normal((3, B, S, channels))
    a, d, bias = RNG.standard_normal((channels, states)), *RNG.standard_normal((2, channels))
    b, c = RNG.standard_normal((2, B, S, states))
    op = OPS["gated_selective_scan"]
    attrs = op.check_attrs({"softplus": True, "log_a": True, "b_norm": True, "b_eps": 0.1})
    y = op.run_reference([x, delta, a, b, c, d, None, None, bias, gate], attrs)[0]
    h, step = np.zeros((B, channels, states)), softplus(delta + bias)
    for t in range(S):
        h = np.exp(step[:, t, :, None] * -np.exp(a)) * h
        h += (step[:, t] * x[:, t])[..., None] * rms(b[:, t], 0.1)[:, None]
        wanted = ((h * c[:, t, None]).sum(-1) + d * x[:, t]) * silu(gate[:, t])
        np.testing.assert_allclose(y[:, t], wanted, rtol=1e-11, atol=1e-13)


def test_gated_ssd_is_a_mamba2_layer() -> None:
    heads, p, states = 2, 3, 4
    x, gate = RNG.standard_normal((2, B, S, heads * p))
    delta, a, bias = RNG.standard_normal((B, S, heads)), *RNG.standard_normal((2, heads))
    b, c = RNG.standard_normal((2, B, S, states))
    op = OPS["gated_ssd"]
    attrs = op.check_attrs(
        {"heads": heads, "softplus": True, "log_a": True, "norm": True, "norm_groups": 2, "eps": 0.1}
    )
    weight = RNG.standard_normal(heads * p)
    y = op.run_reference([x, delta, a, b, c, None, None, bias, gate, weight], attrs)[0]
    h, step = np.zeros((B, heads, p, states)), softplus(delta + bias)
    for t in range(S):
        h = np.exp(step[:, t] * -np.exp(a))[..., None, None] * h
        h += (step[:, t, :, None] * x[:, t].reshape(B, heads, p))[..., None] * b[:, t, None, None]
        gated = (h * c[:, t, None, None]).sum(-1).reshape(B, -1) * silu(gate[:, t])
        wanted = rms(gated.reshape(B, 2, -1), 0.1).reshape(B, -1) * weight
        np.testing.assert_allclose(y[:, t], wanted, rtol=1e-11, atol=1e-13)


def test_matrix_recurrence_with_beta_is_a_gated_delta_rule() -> None:
    heads, d, dv = 2, 3, 4
    q, k = RNG.standard_normal((2, B, S, heads * d))
    v, gate = RNG.standard_normal((2, B, S, heads * dv))
    decay, beta = RNG.standard_normal((B, S, heads)), RNG.random((B, S, heads))
    a_log, bias = RNG.standard_normal((2, heads))
    op = OPS["matrix_recurrence"]
    attrs = op.check_attrs(
        {
            "heads": heads,
            "groups": heads,
            "unit": True,
            "unit_eps": 0.1,
            "q_scale": 0.5,
            "k_scale": 0.6,
            "beta_scale": 1.5,
        }
    )
    y = op.run_reference([q, k, v, decay, beta, None, a_log, bias, gate], attrs)[0]
    q, k, v = (z.reshape(B, S, heads, -1) for z in (q, k, v))
    q, k = 0.5 * rms(q, 0.1), 0.6 * rms(k, 0.1)
    state, log_decay = np.zeros((B, heads, d, dv)), -np.exp(a_log) * softplus(decay + bias)
    for t in range(S):
        state = state * np.exp(log_decay[:, t])[..., None, None]
        error = v[:, t] - np.einsum("bhd,bhdv->bhv", k[:, t], state)
        state = state + np.einsum("bh,bhd,bhv->bhdv", 1.5 * beta[:, t], k[:, t], error)
        wanted = np.einsum("bhd,bhdv->bhv", q[:, t], state).reshape(B, -1) * gate[:, t]
        np.testing.assert_allclose(y[:, t], wanted, rtol=1e-10, atol=1e-12)

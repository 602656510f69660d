"""Recurrences whose reference is their body: every case of theirs against loops in numpy that share nothing with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from weft.ir.op import OPS, Array
from weft.ir.ops.rotary import rotate


def gated_linear_attention(
    q: Array, k: Array, v: Array, decay: Array | None = None, past: Array | None = None, *, heads: int, groups: int = 1
) -> Array | tuple[Array, Array]:
    """S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t, one token after the other."""
    batch, seq, _ = v.shape
    qh, kh = (np.repeat(t.reshape(batch, seq, groups, -1), heads // groups, 2) for t in (q, k))
    vh = v.reshape(batch, seq, heads, -1)
    state = np.zeros((batch, heads, qh.shape[3], vh.shape[3])) if past is None else past
    y = np.zeros_like(vh)
    for t in range(seq):
        kept = state if decay is None else np.exp(decay[:, t].reshape(batch, heads, -1, 1)) * state
        state = kept + kh[:, t, :, :, None] * vh[:, t, :, None]
        y[:, t] = np.einsum("bhde,bhd->bhe", state, qh[:, t])
    return y.reshape(v.shape) if past is None else (y.reshape(v.shape), state)


def gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    decay: Array | None = None,
    past: Array | None = None,
    *,
    heads: int,
    groups: int = 1,
) -> Array | tuple[Array, Array]:
    """S = diag(e^{g_t}) S_{t−1}, S_t = S + β_t k_t (v_t − Sᵀ k_t)ᵀ, y_t = S_tᵀ q_t, one token after the other."""
    batch, seq, _ = v.shape
    qh, kh = (np.repeat(t.reshape(batch, seq, groups, -1), heads // groups, 2) for t in (q, k))
    vh = v.reshape(batch, seq, heads, -1)
    state = np.zeros((batch, heads, qh.shape[3], vh.shape[3])) if past is None else past
    y = np.zeros_like(vh)
    for t in range(seq):
        kept = state if decay is None else np.exp(decay[:, t].reshape(batch, heads, -1, 1)) * state
        known = np.einsum("bhde,bhd->bhe", kept, kh[:, t])
        change = beta[:, t, :, None] * (vh[:, t] - known)
        state = kept + kh[:, t, :, :, None] * change[:, :, None]
        y[:, t] = np.einsum("bhde,bhd->bhe", state, qh[:, t])
    return y.reshape(v.shape) if past is None else (y.reshape(v.shape), state)


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    key_mask: Array | None = None,
    positions: Array | None = None,
    frequencies: Array | None = None,
    past_state: Array | None = None,
    past_norm: Array | None = None,
    *,
    heads: int,
    causal: bool = False,
    interleaved: bool = False,
) -> Array | tuple[Array, Array, Array]:
    """Σ_m φ(q_n)·φ(k_m) v_m / Σ_m φ(q_n)·φ(k_m) by running sums, φ = elu + 1."""
    batch, seq, _ = q.shape
    fq, fk = (np.where(t > 0, t + 1, np.exp(np.minimum(t, 0))) for t in (q, k))
    if key_mask is not None:
        fk = fk * (key_mask != 0)[..., None]
    rq, rk = fq, fk
    if positions is not None and frequencies is not None:
        angles = positions[..., None] * frequencies
        rq, rk = (rotate(t, angles, heads=heads, interleaved=interleaved, amplitude=1.0) for t in (fq, fk))
    qn, kn, rq, rk, vh = (t.reshape(batch, -1, heads, t.shape[2] // heads) for t in (fq, fk, rq, rk, v))
    state = np.einsum("bshd,bshe->bshde", rk, vh)
    norm = kn
    if causal:
        state, norm = np.cumsum(state, 1), np.cumsum(norm, 1)
    else:
        state, norm = state.sum(1, keepdims=True), norm.sum(1, keepdims=True)
    if past_state is not None and past_norm is not None:
        state, norm = state + past_state[:, None], norm + past_norm[:, None]
    share = np.sum(qn * norm, -1, keepdims=True)
    y = np.asarray(np.einsum("bshd,bshde->bshe", rq, np.broadcast_to(state, (batch, seq, *state.shape[2:]))) / share)
    y = y.reshape(batch, seq, -1)
    return y if past_state is None else (y, state[:, -1], norm[:, -1])


def selective_scan(
    x: Array, delta: Array, a: Array, b: Array, c: Array, d: Array | None = None, past: Array | None = None
) -> Array | tuple[Array, Array]:
    """h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t, y_t = C_t h_t + D x_t, one token after the other."""
    state = np.zeros((len(x), *a.T.shape)) if past is None else past
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        step = delta[:, t, None]
        state = np.exp(step * a.T) * state + step * b[:, t, :, None] * x[:, t, None]
        y[:, t] = np.einsum("bnc,bn->bc", state, c[:, t])
    y = y if d is None else y + d * x
    return y if past is None else (y, state)


def ssd(
    x: Array,
    delta: Array,
    a: Array,
    b: Array,
    c: Array,
    d: Array | None = None,
    past: Array | None = None,
    *,
    heads: int,
    groups: int = 1,
) -> Array | tuple[Array, Array]:
    """h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_tᵀ, y_t = h_tᵀ C_t + D x_t, one token after the other."""
    batch, seq, _ = x.shape
    xh = x.reshape(batch, seq, heads, -1)
    bh, ch = (np.repeat(t.reshape(batch, seq, groups, -1), heads // groups, 2) for t in (b, c))
    state = np.zeros((batch, heads, bh.shape[3], xh.shape[3])) if past is None else past
    y = np.zeros_like(xh)
    for t in range(seq):
        step = delta[:, t, :, None, None]
        state = np.exp(step * a[:, None, None]) * state + step * bh[:, t, :, :, None] * xh[:, t, :, None]
        y[:, t] = np.einsum("bhnp,bhn->bhp", state, ch[:, t])
    y = y if d is None else y + d[:, None] * xh
    return y.reshape(x.shape) if past is None else (y.reshape(x.shape), state)


DEFINITIONS: tuple[Callable[..., Any], ...] = (
    *(gated_linear_attention, gated_delta_rule, linear_attention, selective_scan, ssd),
)
CASES = [
    pytest.param(definition, index, id=f"{definition.__name__}-{index}")
    for definition in DEFINITIONS
    for index in range(len(OPS[definition.__name__].cases))
]


@pytest.mark.parametrize(("definition", "index"), CASES)
def test_the_reference_is_the_definition(definition: Callable[..., Any], index: int) -> None:
    op = OPS[definition.__name__]
    case = op.cases[index]
    operands, attrs = case.draw(7), op.check_attrs(case.attrs)
    wanted = definition(*operands, **attrs)
    found = op.run_reference(operands, attrs)
    for a, b in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10 * np.abs(b).max())

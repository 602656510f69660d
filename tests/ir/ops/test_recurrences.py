"""Linear attention, short convolutions and state spaces against their formulas and Transformers' Mamba layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from weft.ir import Op, ops

B, S = 2, 11
RNG = np.random.default_rng(13)
PIECES = [(11,), (1,) * 11, (4, 7), (5, 1, 1, 4)]


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def phi(x: np.ndarray) -> np.ndarray:
    return np.asarray(F.elu(torch.from_numpy(x)) + 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_linear_attention(causal: bool, turned: bool) -> None:
    """v'_n = Σ_m φ(q_n)·φ(k_m) v_m / Σ_m φ(q_n)·φ(k_m); RoPE on the φ of the numerator only."""
    heads, d, dv = 2, 4, 3
    q, k, v = draw(B, S, heads * d), draw(B, S, heads * d), draw(B, S, heads * dv)
    at, frequencies = np.arange(S)[None].repeat(B, 0), np.array([1.0, 0.1])
    extra = (None, at, frequencies) if turned else ()
    found = ops.linear_attention.reference(q, k, v, *extra, heads=heads, causal=causal).reshape(B, S, heads, dv)

    def rotation(n: int) -> np.ndarray:
        """The matrix that turns pairs (i, i + 2) by n·frequencies."""
        c, s = np.diag(np.cos(n * frequencies)), np.diag(np.sin(n * frequencies))
        return np.block([[c, -s], [s, c]]) if turned else np.eye(d)

    for b in range(B):
        for h in range(heads):
            fq, fk = (phi(x[b].reshape(S, heads, d)[:, h]) for x in (q, k))
            values = v[b].reshape(S, heads, dv)[:, h]
            for n in range(S):
                seen = range(n + 1 if causal else S)
                top = sum((rotation(n) @ fq[n]) @ (rotation(m) @ fk[m]) * values[m] for m in seen)
                bottom = sum(fq[n] @ fk[m] for m in seen)
                np.testing.assert_allclose(found[b, n, h], top / bottom, rtol=1e-10)


def test_linear_attention_leaves_masked_keys_out() -> None:
    q, k, v = draw(B, S, 4), draw(B, S, 4), draw(B, S, 4)
    mask = np.arange(S) < np.array([[S], [6]])
    found = ops.linear_attention.reference(q, k, v, mask, heads=1)
    np.testing.assert_allclose(found[1], ops.linear_attention.reference(q[1:], k[1:, :6], v[1:, :6], heads=1)[0])


def in_pieces(op: Op, pieces: tuple[int, ...], whole: list[Any], states: list[np.ndarray], **attrs: Any) -> Any:
    """Run `op` piece after piece; `whole` holds functions from a slice of time to the operands."""
    start, found = 0, []
    for n in pieces:
        cut = slice(start, start + n)
        y, *states = op.reference(*(x(cut) for x in whole), *states, **attrs)
        found.append(y)
        start += n
    return np.concatenate(found, 1), states


def timed(x: np.ndarray) -> Any:
    return lambda cut: x[:, cut]


def fixed(x: Any) -> Any:
    return lambda cut: x


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("turned", [False, True])
def test_linear_attention_in_pieces(pieces: tuple[int, ...], turned: bool) -> None:
    q, k, v = draw(B, S, 8), draw(B, S, 8), draw(B, S, 6)
    at = timed(np.arange(S)[None].repeat(B, 0)) if turned else fixed(None)
    frequencies = np.array([1.0, 0.1]) if turned else None
    whole = ops.linear_attention.reference(q, k, v, None, at(slice(None)), frequencies, heads=2, causal=True)
    operands = [timed(q), timed(k), timed(v), fixed(None), at, fixed(frequencies)]
    states = [np.zeros((B, 2, 4, 3)), np.zeros((B, 2, 4))]
    found, _ = in_pieces(ops.linear_attention, pieces, operands, states, heads=2, causal=True)
    np.testing.assert_allclose(found, whole, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("gates", [0, 4, 12])
def test_gated_linear_attention(gates: int) -> None:
    """y_t = Σ_{s ≤ t} v_s Σ_i q_ti k_si exp(Σ_{s < r ≤ t} g_ri), summed term by term; groups share q and k."""
    heads, groups, d, dv = 4, 2, 3, 5
    q, k, v = draw(B, S, groups * d), draw(B, S, groups * d), draw(B, S, heads * dv)
    g = -np.abs(draw(B, S, gates)) if gates else None
    found = ops.gated_linear_attention.reference(q, k, v, g, heads=heads, groups=groups).reshape(B, S, heads, dv)
    by_key = np.zeros((B, S, heads, d)) if g is None else np.repeat(g, 12 // gates, 2).reshape(B, S, heads, d)
    qs, ks, vs = q.reshape(B, S, groups, d), k.reshape(B, S, groups, d), v.reshape(B, S, heads, dv)
    for t in range(S):
        for h in range(heads):
            wanted = np.zeros((B, dv))
            for s in range(t + 1):
                faded = np.exp(by_key[:, s + 1 : t + 1, h].sum(1))
                wanted += (qs[:, t, h // 2] * ks[:, s, h // 2] * faded).sum(-1, keepdims=True) * vs[:, s, h]
            np.testing.assert_allclose(found[:, t, h], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pieces", PIECES)
def test_gated_linear_attention_in_pieces(pieces: tuple[int, ...]) -> None:
    q, k, v, g = draw(B, S, 6), draw(B, S, 6), draw(B, S, 20), -np.abs(draw(B, S, 4))
    whole = ops.gated_linear_attention.reference(q, k, v, g, heads=4, groups=2)
    operands = [timed(q), timed(k), timed(v), timed(g)]
    found, _ = in_pieces(ops.gated_linear_attention, pieces, operands, [np.zeros((B, 4, 3, 5))], heads=4, groups=2)
    np.testing.assert_allclose(found, whole, rtol=1e-12, atol=1e-14)


def test_causal_conv_is_conv1d() -> None:
    x, weight, bias = draw(B, S, 6), draw(6, 4), draw(6)
    padded = F.pad(torch.from_numpy(x).transpose(1, 2), (3, 0))
    wanted = F.conv1d(padded, torch.from_numpy(weight)[:, None], torch.from_numpy(bias), groups=6)
    found = ops.causal_conv.reference(x, weight, bias, activation="silu")
    np.testing.assert_allclose(found, F.silu(wanted).transpose(1, 2), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("pieces", PIECES)
def test_causal_conv_in_pieces(pieces: tuple[int, ...]) -> None:
    x, weight, bias = draw(B, S, 6), draw(6, 4), draw(6)
    whole = ops.causal_conv.reference(x, weight, bias)
    found, (present,) = in_pieces(
        ops.causal_conv, pieces, [timed(x), fixed(weight), fixed(bias)], [np.zeros((B, 3, 6))]
    )
    np.testing.assert_allclose(found, whole, rtol=1e-13)
    np.testing.assert_array_equal(present, x[:, -3:])


@pytest.mark.parametrize("pieces", PIECES)
def test_scans_in_pieces(pieces: tuple[int, ...]) -> None:
    x, delta, a = draw(B, S, 4), np.abs(draw(B, S, 4)), -np.abs(draw(4, 3))
    b, c, d = draw(B, S, 3), draw(B, S, 3), draw(4)
    whole = ops.selective_scan.reference(x, delta, a, b, c, d)
    operands = [timed(x), timed(delta), fixed(a), timed(b), timed(c), fixed(d)]
    found, _ = in_pieces(ops.selective_scan, pieces, operands, [np.zeros((B, 3, 4))])
    np.testing.assert_allclose(found, whole, rtol=1e-12, atol=1e-14)

    x, a, b, c = draw(B, S, 20), -np.abs(draw(4)), draw(B, S, 6), draw(B, S, 6)
    whole = ops.ssd.reference(x, delta, a, b, c, d, heads=4, groups=2)
    operands = [timed(x), timed(delta), fixed(a), timed(b), timed(c), fixed(d)]
    found, _ = in_pieces(ops.ssd, pieces, operands, [np.zeros((B, 4, 3, 5))], heads=4, groups=2)
    np.testing.assert_allclose(found, whole, rtol=1e-12, atol=1e-14)


def test_ssd_is_a_selective_scan_with_scalar_decay() -> None:
    """Mamba-2's recurrence is Mamba's with A constant over a head's channels and states."""
    heads, p, n = 3, 2, 4
    x, delta, a = draw(B, S, heads * p), np.abs(draw(B, S, heads)), -np.abs(draw(heads))
    b, c, d = draw(B, S, n), draw(B, S, n), draw(heads)
    wide = np.repeat(a, p)[:, None].repeat(n, 1)
    wanted = ops.selective_scan.reference(x, np.repeat(delta, p, 2), wide, b, c, np.repeat(d, p))
    np.testing.assert_allclose(ops.ssd.reference(x, delta, a, b, c, d, heads=heads), wanted, rtol=1e-12)


def parameters(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Every parameter filled with normal numbers, in float64."""
    torch.manual_seed(2)
    module.double().eval()
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


def silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1 + np.exp(-x)))


def test_mamba_layer() -> None:
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = MambaConfig(hidden_size=6, state_size=4, expand=2, time_step_rank=3, conv_kernel=4, num_hidden_layers=1)
    module = MambaMixer(config, 0)
    p = parameters(module)
    u = draw(B, S, 6)
    with torch.no_grad():
        wanted = module(torch.from_numpy(u))
    x, gate = np.split(u @ p["in_proj.weight"].T, 2, -1)
    x = ops.causal_conv.reference(x, p["conv1d.weight"][:, 0], p["conv1d.bias"], activation="silu")
    step, b, c = np.split(x @ p["x_proj.weight"].T, [3, 7], -1)
    delta = np.logaddexp(0, step @ p["dt_proj.weight"].T + p["dt_proj.bias"])
    y = ops.selective_scan.reference(x, delta, -np.exp(p["A_log"]), b, c, p["D"])
    found = y * silu(gate) @ p["out_proj.weight"].T
    np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(found).max())  # parts of it are in float32


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_layer(groups: int) -> None:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    heads, p_, n, inner = 4, 3, 5, 12
    config = Mamba2Config(
        hidden_size=6,
        state_size=n,
        expand=2,
        num_heads=heads,
        head_dim=p_,
        n_groups=groups,
        conv_kernel=4,
        chunk_size=4,
        num_hidden_layers=1,
    )
    module = Mamba2Mixer(config, 0)
    p = parameters(module)
    u = draw(B, S, 6)
    with torch.no_grad():
        wanted = module(torch.from_numpy(u))
    gate, x, step = np.split(u @ p["in_proj.weight"].T, [inner, 2 * inner + 2 * groups * n], -1)
    x = ops.causal_conv.reference(x, p["conv1d.weight"][:, 0], p["conv1d.bias"], activation="silu")
    x, b, c = np.split(x, [inner, inner + groups * n], -1)
    delta = np.logaddexp(0, step + p["dt_bias"])
    y = ops.ssd.reference(x, delta, -np.exp(p["A_log"]), b, c, p["D"], heads=heads, groups=groups)
    grouped = (y * silu(gate)).reshape(B, S, groups, -1)
    y = ops.rms_norm.reference(grouped, eps=config.layer_norm_epsilon).reshape(B, S, inner) * p["norm.weight"]
    found = y @ p["out_proj.weight"].T
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(found).max())  # parts of it are in float32

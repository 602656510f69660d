"""Reference definitions of attention, RoPE and its frequencies for checks; they share no code with the ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from weft.ir.recipes.readers import Array


def attend(
    may_attend: Callable[[int, int], bool],
    q: Array,
    k: Array,
    v: Array | None = None,
    bias: Array | None = None,
    key_mask: Array | None = None,
    sinks: Array | None = None,
    *,
    heads: int,
    kv_heads: int,
    causal: bool,
    scale: float | None,
    softcap: float | None,
    value_dim: int | None,
    **_: Any,
) -> Array:
    """Return the output of the op `attention` without a cache, [batch, queries, heads·value_dim].

    `may_attend(i, j)` states whether query i may attend to key j, in place of the op's window and pattern; `causal` and
    `key_mask` mask further keys. Shapes: q [batch, queries, heads·d], k [batch, keys, kv_heads·d], v [batch, keys,
    kv_heads·value_dim]. Without v, values are the first `value_dim` features of each key head.
    """
    batch, seq, width = q.shape
    d = width // heads
    allowed = np.array([[may_attend(i, j) and (j <= i or not causal) for j in range(k.shape[1])] for i in range(seq)])
    rows = []
    for b in range(batch):
        outputs = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            key = k[b, :, g * d : (g + 1) * d]
            value = key[:, :value_dim] if v is None else np.split(v[b], kv_heads, axis=1)[g]
            score = q[b, :, h * d : (h + 1) * d] @ key.T * (d**-0.5 if scale is None else scale)
            if softcap is not None:
                score = softcap * np.tanh(score / softcap)
            if bias is not None:
                score = score + bias[b % len(bias), h % bias.shape[1]]
            visible = allowed if key_mask is None else allowed & (key_mask[b % len(key_mask)] != 0)
            highest = np.where(visible, score, -np.inf).max(1, keepdims=True)
            # For a query whose keys are all masked, −∞ − (−∞) would be NaN.
            highest = np.where(np.isfinite(highest), highest, 0)
            # Masked scores are replaced first, as exp of them may overflow.
            powers = np.where(visible, np.exp(np.where(visible, score, highest) - highest), 0)
            total = powers.sum(1, keepdims=True) + (0 if sinks is None else np.exp(sinks[h] - highest))
            # The output of a query whose keys are all masked is 0.
            outputs.append(powers @ value / np.where(total == 0, 1, total))
        rows.append(np.concatenate(outputs, 1))
    return np.stack(rows)


def rotate_pairs(
    x: Array, positions: Array, frequencies: Array, *, heads: int, interleaved: bool, amplitude: float = 1.0
) -> Array:
    """Apply the op `rope`: multiply feature pairs, as complex numbers, by amplitude · e^(i · position · frequency).

    Shapes: x [batch, seq, heads·d], positions [batch or 1, seq], frequencies [pairs]. Features of a head beyond the
    first 2·pairs stay unchanged. Pairs are adjacent features if `interleaved`, else features p and p + pairs.
    """
    batch, seq, width = x.shape
    pairs = len(frequencies)
    y = x.reshape(batch, seq, heads, width // heads).copy()
    real, imaginary = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    rotation = amplitude * np.exp(1j * (positions[:, :, None, None] * frequencies))
    z = (y[..., real] + 1j * y[..., imaginary]) * rotation
    y[..., real], y[..., imaginary] = z.real, z.imag
    return y.reshape(x.shape)


def compute_amplitude(scaling: str, factor: float) -> float:
    """Return the amplitude of rotated queries and keys: 0.1·ln(factor) + 1 for yarn (√(1/t), Peng 2023), else 1."""
    return 1 + math.log(factor) / 10 if scaling == "yarn" else 1.0


def compute_frequencies(
    dim: int,
    theta: float,
    *,
    scaling: str,
    factor: float,
    original: int,
    beta_fast: float,
    beta_slow: float,
    low_freq: float,
    high_freq: float,
    truncate: bool,
    **_: Any,
) -> Array:
    """Return the RoPE frequencies [dim/2], in radians per position, after `scaling`:

    none: theta^(-2k/dim) for pair k, counted from 0.
    linear: divided by `factor` (Chen 2023).
    ntk: the last pair is divided by `factor`, the first not (bloc97 2023).
    yarn: interpolated by pair index between none (first pairs) and linear, as in the code of Peng 2023.
    llama3: interpolated by wavelength between none (short ones) and linear (Llama 3.1, 2024).
    """
    scaled = []
    for k in range(dim // 2):
        plain = math.exp(-2 * k / dim * math.log(theta))
        wavelength = 2 * math.pi / plain
        if scaling == "linear":
            plain /= factor
        elif scaling == "ntk":
            plain *= factor ** (-k / (dim / 2 - 1))
        elif scaling == "llama3":
            if wavelength > original / low_freq:
                plain /= factor
            elif wavelength > original / high_freq:
                share = (original / wavelength - low_freq) / (high_freq - low_freq)
                plain *= share + (1 - share) / factor
        elif scaling == "yarn":
            # the pairs whose wavelength fits beta times into the original context
            fast, slow = (math.log(original / beta / (2 * math.pi), theta) * dim / 2 for beta in (beta_fast, beta_slow))
            fast, slow = (math.floor(fast), math.ceil(slow)) if truncate else (fast, slow)
            fast, slow = max(fast, 0), min(slow, dim - 1)
            share = min(max((k - fast) / max(slow - fast, 0.001), 0.0), 1.0)
            plain *= (1 - share) + share / factor
        scaled.append(plain)
    return np.array(scaled)

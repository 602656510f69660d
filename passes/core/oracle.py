"""Reference definitions for checks: attention under any mask, and frequencies of RoPE, without code of recipes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from weft.ir import ops
from weft.ir.recipes.readers import Array


def attend(
    may_attend: Callable[[int, int], bool],
    q: Array,
    k: Array,
    v: Array | None = None,
    bias: Array | None = None,
    key_mask: Array | None = None,
    sinks: Array | None = None,
    **attrs: Any,
) -> Array:
    """Return the output of the op `attention` without a cache, [batch, queries, heads·value_dim].

    `may_attend(i, j)` states whether query i may attend to key j, in place of the window and pattern in `attrs`; their
    `causal` and `key_mask` mask further keys.
    """
    allowed = np.array([[may_attend(i, j) for j in range(k.shape[1])] for i in range(q.shape[1])])
    masked = np.where(allowed[None, None], 0.0 if bias is None else bias, -np.inf)
    attrs |= {"window": None, "keep_first": 0, "pattern": "dense"}
    return np.asarray(ops.attention.reference(q, k, v, masked, key_mask, sinks, **attrs))


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

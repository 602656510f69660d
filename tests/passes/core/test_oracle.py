"""References that checks compare with, against PyTorch and formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from weft.passes.core.oracle import attend, compute_amplitude, compute_frequencies


def test_attention_reference_equals_torch() -> None:
    """The definition that checks compare with, against torch."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 6, 12)), rng.standard_normal((2, 6, 6)), rng.standard_normal((2, 6, 6))
    seen = torch.tensor([[abs(i - j) < 3 or j < 1 for j in range(6)] for i in range(6)])
    by_head = [torch.from_numpy(x).unflatten(2, (-1, 3)).transpose(1, 2) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*by_head, attn_mask=seen, scale=0.7, enable_gqa=True)
    plain: dict[str, Any] = {"heads": 4, "kv_heads": 2, "causal": False, "softcap": None, "value_dim": None}
    found = attend(lambda i, j: abs(i - j) < 3 or j < 1, q, k, v, scale=0.7, **plain)
    np.testing.assert_allclose(found, want.transpose(1, 2).flatten(2), rtol=1e-12, atol=1e-14)


SCALING: dict[str, Any] = {
    **{"factor": 4.0, "original": 16, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"low_freq": 1.0, "high_freq": 4.0, "truncate": True},
}


def test_frequencies_of_the_published_formulas() -> None:
    plain = 100.0 ** np.array([0.0, -0.25, -0.5, -0.75])
    found = {
        s: compute_frequencies(8, 100.0, scaling=s, **SCALING) for s in ("none", "linear", "ntk", "llama3", "yarn")
    }
    np.testing.assert_allclose(found["none"], plain)
    np.testing.assert_allclose(found["linear"], plain / 4)
    np.testing.assert_allclose(found["ntk"] / plain, [1, 4 ** (-1 / 3), 4 ** (-2 / 3), 1 / 4])
    # Wavelengths 6.3, 19.9, 62.8 and 198.7; the original context has 16 positions, and 16 / 4 of them are short.
    share = (16 / (2 * np.pi) - 1) / 3
    np.testing.assert_allclose(found["llama3"] / plain, [share + (1 - share) / 4, 1 / 4, 1 / 4, 1 / 4])
    np.testing.assert_allclose(found["yarn"][[0, 2, 3]] / plain[[0, 2, 3]], [1, 1 / 4, 1 / 4])
    assert compute_amplitude("yarn", np.e) == pytest.approx(1.1) and compute_amplitude("linear", 8.0) == 1.0


def test_attention_reference_with_bias_sink_and_masked_rows() -> None:
    """Two keys with scores ln 3 and 0 after the soft cap; a sink of ln 4 takes half of the weights."""
    q, k, v = np.array([[[1.0], [1.0]]]), np.array([[[0.0], [0.0]]]), np.array([[[8.0, 1.0], [0.0, 2.0]]])
    bias, sinks = np.array([[[[np.log(3), 0.0], [0.0, 0.0]]]]), np.array([np.log(4)])
    plain: dict[str, Any] = {"heads": 1, "kv_heads": 1, "causal": False, "scale": None, "value_dim": None}
    found = attend(lambda i, j: i == 0, q, k, v, bias, None, sinks, softcap=5.0, **plain)
    np.testing.assert_allclose(found, [[[3 / 8 * 8, 3 / 8 + 2 / 8], [0.0, 0.0]]])
    capped = attend(lambda i, j: True, q, np.array([[[100.0], [0.0]]]), v, softcap=np.log(3), **plain)
    np.testing.assert_allclose(capped[0, 0], [6.0, 1.25])
    masked = attend(lambda i, j: True, q, k, v, None, np.array([[1, 0]]), softcap=None, **plain)
    np.testing.assert_allclose(masked[0], [[8.0, 1.0], [8.0, 1.0]])

"""Tolerances and distances of logits, by hand."""

from __future__ import annotations

import numpy as np

from weft.frontends.app.api.verify.error_bounds import compute_divergences, compute_tolerance


def test_divergences_of_logits_and_tolerances() -> None:
    want, got = np.array([[0.0, 4.0]]), np.array([[1.0, 4.0]])
    p, q = (np.exp(x) / np.exp(x).sum() for x in (want[0], got[0]))
    np.testing.assert_allclose(compute_divergences(want, got), [(p * np.log(p / q)).sum()], rtol=1e-12)
    assert (
        compute_tolerance("f32", 30, 576)
        < 1e-4
        < compute_tolerance("f16", 30, 576)
        < compute_tolerance("bf16", 30, 576)
        < 0.3
    )

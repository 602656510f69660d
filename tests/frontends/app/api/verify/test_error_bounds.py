"""Tolerances and distances of logits, by hand."""

from __future__ import annotations

import numpy as np

from weft.frontends.app.api.verify.error_bounds import compute_divergences, compute_relative_error, compute_tolerance


def test_relative_errors_and_divergences_of_logits() -> None:
    want, got = np.array([[0.0, 4.0]]), np.array([[1.0, 4.0]])
    assert compute_relative_error(got, want) == 0.25
    assert compute_relative_error(want, want) == 0
    assert np.isnan(compute_relative_error(np.array([np.nan]), np.array([1.0])))
    p, q = (np.exp(x) / np.exp(x).sum() for x in (want[0], got[0]))
    np.testing.assert_allclose(compute_divergences(want, got), [(p * np.log(p / q)).sum()], rtol=1e-12)
    assert (
        compute_tolerance("f32", 30, 576)
        < 1e-4
        < compute_tolerance("f16", 30, 576)
        < compute_tolerance("bf16", 30, 576)
        < 0.3
    )

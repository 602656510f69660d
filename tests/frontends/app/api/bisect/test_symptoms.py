"""Patterns of differences: each is found in data that was made with it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from weft.frontends.app.api.bisect.symptoms import Array, list_roundings, list_symptoms, name_factor, permute_heads

X = np.random.default_rng(0).normal(size=(1, 7, 16))


def with_row(x: Array) -> Array:
    y = x.copy()
    y[:, 3:] += 0.1
    return y


def with_feature(x: Array) -> Array:
    y = x.copy()
    y[..., 5] = 0
    return y


def with_column(x: Array) -> Array:
    """The difference is an outer product, as one differing column of a weight causes it."""
    return x + np.random.default_rng(1).normal(size=(7, 1)) * np.random.default_rng(2).normal(size=16)


CASES: list[tuple[str, str, Callable[[Array], Array]]] = [
    ("factor", "0.353553 = 1/√8", lambda x: x / math.sqrt(8)),
    ("bias", "same vector", lambda x: x + np.arange(16)),
    ("permuted heads", "[2, 0, 1, 3]", lambda x: x.reshape(1, 7, 4, 4)[:, :, [2, 0, 1, 3]].reshape(x.shape)),
    ("interleaved", "halves of 2", lambda x: x.reshape(1, 7, 2, 2, 4).swapaxes(-1, -2).reshape(x.shape)),
    ("permuted features", "features", lambda x: x[..., np.random.default_rng(3).permutation(16)]),
    ("rounding", "bf16", lambda x: x.astype(np.float32).view(np.uint32).__and__(0xFFFF0000).view(np.float32)),
    ("positions", "from 3 on, of 7", with_row),
    ("features", "5, of 16", with_feature),
    ("feature factors", "own factor", lambda x: x * np.linspace(1, 2, 16)),
    ("norm", "each position", lambda x: x / np.sqrt(np.square(x).mean(-1, keepdims=True)) * np.linspace(1, 2, 16)),
    ("input feature", "rank one", with_column),
]


@pytest.mark.parametrize(("kind", "text", "change"), CASES, ids=[kind for kind, *_ in CASES])
def test_patterns_are_found_first(kind: str, text: str, change: Callable[[Array], Array]) -> None:
    found = list(list_symptoms(X, np.asarray(change(X), np.float64), 1e-6, (2, 4, 8)))
    assert found[0].kind == kind and text in found[0].text


def test_unrelated_values_have_no_pattern() -> None:
    assert list(list_symptoms(X, np.random.default_rng(9).normal(size=X.shape), 1e-6, (2, 4))) == []
    assert list(list_symptoms(X * np.nan, X, 1e-6, (2, 4))) == []


def test_factors_are_named() -> None:
    assert name_factor(0.25, (4, 8)) == "0.25 = 1/4"
    assert name_factor(1.01, (4, 8)) == "1.01"


def test_permutations_of_heads_keep_all_elements() -> None:
    for _, _, moved in permute_heads(X, (2, 4, 8)):
        np.testing.assert_array_equal(np.sort(moved), np.sort(X))


def test_roundings_are_as_near_as_their_steps() -> None:
    for name, rounded in list_roundings(X[0]):
        step = np.abs(X).max() * (2.0**-8 if name == "bf16" else 2.0**-11 if name == "f16" else 1 / 254)
        assert 0 < np.abs(rounded - X[0]).max() <= step * (1 + 1e-12), name

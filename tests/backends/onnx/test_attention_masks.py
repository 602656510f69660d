"""Sparse patterns on both CPU targets: a full pass and cached decoding equal a formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from weft.ir.schema import visible_keys

from .attention_models import Array, Decoding, decoder, draw, formula

TARGETS = ("onnx", "ort-cpu")
LENGTH = 26
# Attributes, and what they mean for a query i and a key j: Child 2019 (strided, fixed), Beltagy 2020 (window, dilated).
PATTERNS: dict[str, tuple[dict[str, Any], Callable[[Array, Array], Array]]] = {
    "banded": ({"window": 5}, lambda i, j: abs(i - j) <= 4),
    "banded, and the first keys": ({"window": 5, "keep_first": 3}, lambda i, j: (abs(i - j) <= 4) | (j <= 2)),
    "dilated": ({"pattern": "dilated", "stride": 3}, lambda i, j: (i - j) % 3 == 0),
    "dilated in a band": (
        {"pattern": "dilated", "stride": 2, "window": 9},
        lambda i, j: np.isin(i - j, range(-8, 9, 2)),
    ),
    "strided": ({"pattern": "strided", "stride": 6}, lambda i, j: (abs(i - j) < 6) | ((i - j) % 6 == 0)),
    "fixed": (
        {"pattern": "fixed", "stride": 7, "summary": 2},
        lambda i, j: (i // 7 == j // 7) | np.isin(j % 7, (5, 6)),
    ),
    "chunked, and the first key": (
        {"pattern": "chunked", "stride": 8, "keep_first": 1},
        lambda i, j: (i // 8 == j // 8) | (j == 0),
    ),
    "chunked": ({"pattern": "chunked", "stride": 8}, lambda i, j: i // 8 == j // 8),
}


def test_every_pattern_is_here() -> None:
    assert {attrs.get("pattern", "dense") for attrs, _ in PATTERNS.values()} == {*visible_keys.PATTERNS}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", PATTERNS)
def test_full_pass(name: str, causal: bool, target: str) -> None:
    attrs, seen = PATTERNS[name]
    graph = decoder(**{**attrs, "causal": causal})
    decoding = Decoding(graph, target, 2, LENGTH, "dce")
    assert "Softmax" not in decoding.ops
    inputs = draw(np.random.default_rng(1), graph, 2, LENGTH)
    found = decoding.call(inputs, np.zeros((2, 1)), np.ones((2, 1)))
    np.testing.assert_allclose(found, formula(inputs, seen, causal=causal), atol=3e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cuts", [(1,) * LENGTH, (11, 1, 9, 1, 1, 3)], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_cached(name: str, cuts: tuple[int, ...], target: str) -> None:
    attrs, seen = PATTERNS[name]
    graph = decoder(**attrs)
    decoding = Decoding(graph, target, 2 if target == "onnx" else 1, 32)
    assert "Softmax" not in decoding.ops
    inputs = draw(np.random.default_rng(1), graph, 2 if target == "onnx" else 1, LENGTH)
    np.testing.assert_allclose(decoding.chunks(inputs, cuts), formula(inputs, seen), atol=3e-6)

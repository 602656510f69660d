"""Sparse patterns on both CPU targets: a full pass and cached decoding equal a formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .... import masks
from ..attention_models import Array, Decoding, decoder, draw, formula

TARGETS = ("onnx", "ort-cpu")
LENGTH = 26
# Attributes, and what they mean for arrays of the positions of queries and keys; "dense" is no mask.
PATTERNS: dict[str, tuple[dict[str, Any], Callable[[Array, Array], Array]]] = {
    name: (settings, np.vectorize(seen, otypes=[bool])) for name, (settings, seen) in masks.PATTERNS.items() if settings
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", PATTERNS)
def test_sparse_pattern_in_a_full_pass(name: str, causal: bool, target: str) -> None:
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
def test_sparse_pattern_in_cached_decoding(name: str, cuts: tuple[int, ...], target: str) -> None:
    attrs, seen = PATTERNS[name]
    graph = decoder(**attrs)
    decoding = Decoding(graph, target, 2 if target == "onnx" else 1, 32)
    assert "Softmax" not in decoding.ops
    inputs = draw(np.random.default_rng(1), graph, 2 if target == "onnx" else 1, LENGTH)
    np.testing.assert_allclose(decoding.chunks(inputs, cuts), formula(inputs, seen), atol=3e-6)

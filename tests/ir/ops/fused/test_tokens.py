"""Embeddings with positions, and token sampling, against worked examples."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, TensorType, WeftError, ops
from weft.ir.op import OPS
from weft.ir.types import dtypes

IDS, AT = np.array([[2, 0]]), np.array([[1, 3]])
TABLE, POSITIONS = np.arange(6.0).reshape(3, 2), np.arange(12.0).reshape(6, 2)


def test_embeddings_are_scaled_before_positions_are_added() -> None:
    op = OPS["embed_tokens"]
    (x,) = op.run_reference([IDS, TABLE, AT, POSITIONS], op.check_attrs({"scale": 2.0, "offset": 2}))
    assert x.tolist() == [[[8 + 6, 10 + 7], [0 + 10, 2 + 11]]]


def test_each_frequency_table_gives_cosines_and_sines() -> None:
    op = OPS["embed_tokens"]
    frequencies = np.array([1.0, 0.5]), np.array([0.25])
    attrs = op.check_attrs({"amplitudes": (1.0, 3.0)})
    _, *angles = op.run_reference([IDS, TABLE, AT, None, *frequencies], attrs)
    for i, (f, amplitude) in enumerate(zip(frequencies, (1.0, 3.0), strict=True)):
        np.testing.assert_allclose(angles[2 * i], amplitude * np.cos(AT[..., None] * f))
        np.testing.assert_allclose(angles[2 * i + 1], amplitude * np.sin(AT[..., None] * f))


PROBABILITIES = np.array([0.1, 0.4, 0.2, 0.3])


@pytest.mark.parametrize(
    ("attrs", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.65}, [1, 3]),  # 0.4 alone is less than 0.65
        ({"top_p": 0.3}, [1]),
        ({"min_p": 0.45}, [1, 2, 3]),  # at least 0.45 · 0.4
    ],
)
def test_samples_follow_the_probabilities_of_the_remaining_tokens(attrs: dict[str, float], kept: list[int]) -> None:
    op = OPS["choose_tokens"]
    uniforms = (np.arange(200)[:, None] + 0.5) / 200
    logits = np.log(PROBABILITIES)[None].repeat(200, 0)
    (tokens,) = op.run_reference([logits, uniforms], op.check_attrs({"temperature": 1.0, **attrs}))
    wanted = np.where(np.isin(np.arange(4), kept), PROBABILITIES, 0)
    counts = np.bincount(tokens.reshape(-1), minlength=4) / 200
    np.testing.assert_allclose(counts, wanted / wanted.sum(), atol=0.006)


def test_without_temperature_the_most_likely_token_is_chosen() -> None:
    op = OPS["choose_tokens"]
    (tokens,) = op.run_reference([np.array([[0.0, 2, 1], [3, 1, 3]])], op.check_attrs({}))
    assert tokens.tolist() == [[1], [0]]  # the first of equal logits


def test_sampling_needs_a_uniform_number_per_row() -> None:
    logits = Graph().add_input("logits", TensorType(dtypes.f32, (2, 5)))
    with pytest.raises(WeftError, match=r"sampling needs uniforms \[batch, 1\]"):
        ops.choose_tokens(logits, temperature=1.0)
    with pytest.raises(WeftError, match="must not be negative"):
        ops.choose_tokens(logits, temperature=-1.0)

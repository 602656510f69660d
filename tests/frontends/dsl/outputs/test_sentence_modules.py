"""Pooling of token vectors, and the modules before and after it, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import Dense, SentencePooling, UnitLength, WordWeights, trace
from weft.ir import TensorType, WeftError
from weft.ir.types import dtypes

from ..harness import X, randomize, run

IDS = np.array([[5, 1, 7, 2, 0], [3, 5, 4, 4, 9]])
MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
LEFT = MASK[:, ::-1].copy()
STATES = np.random.default_rng(0).standard_normal((2, 5, 16)).astype(np.float32).astype(np.float64)
POOLED: dict[str, Any] = {  # of the vectors x of a row without padding
    "mean": lambda x: x.mean(0),
    "cls": lambda x: x[0],
    "max": lambda x: x.max(0),
    "last": lambda x: x[-1],
    "weighted": lambda x: np.average(x, 0, np.arange(1, len(x) + 1)),
    "mean_sqrt_len": lambda x: x.sum(0) / len(x) ** 0.5,
}


def pooled(pooling: SentencePooling, mask: np.ndarray = MASK) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the output of `pooling`, and its weights."""
    tokens = TensorType(dtypes.i64, X.shape[:2])
    graph = trace(lambda x, mask, ids: pooling(x, mask, ids), {"x": X, "mask": tokens, "ids": tokens})
    weights = randomize(graph, np.random.default_rng(1))
    return run(graph, {"x": STATES, "mask": mask, "ids": IDS}, "interpreter")["output"], weights


@pytest.mark.parametrize("mask", [MASK, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("mode", POOLED)
def test_padding_on_either_side_is_not_pooled(mode: str, mask: np.ndarray) -> None:
    want = [POOLED[mode](STATES[b][mask[b] == 1]) for b in range(2)]
    np.testing.assert_allclose(pooled(SentencePooling(mode), mask)[0], want, rtol=1e-6)


def test_several_modes_are_concatenated() -> None:
    want = np.concatenate([pooled(SentencePooling(mode))[0] for mode in ("max", "cls")], axis=1)
    np.testing.assert_array_equal(pooled(SentencePooling(("max", "cls")))[0], want)


@pytest.mark.parametrize(
    ("options", "positions"),
    [({"mode": "token", "token": 5}, (0, 1)), ({"mode": "token"}, (2, 4)), ({"mode": "end"}, (4, 4))],
)
def test_a_single_token_is_pooled(options: dict[str, Any], positions: tuple[int, int]) -> None:
    found = pooled(SentencePooling(**options))[0]
    np.testing.assert_array_equal(found, STATES[[0, 1], list(positions)])


def test_prompts_are_not_pooled() -> None:
    mask = np.array([[2, 2, 1, 1, 0], [2, 1, 1, 1, 1]])
    want = [STATES[b][mask[b] == 1].mean(0) for b in range(2)]
    np.testing.assert_allclose(pooled(SentencePooling(include_prompt=False), mask)[0], want, rtol=1e-6)


def test_means_of_weighted_words_divide_by_the_weights() -> None:
    words = tuple(np.linspace(0.5, 2, 10).tolist())
    want = []
    for b in range(2):
        shown = MASK[b] == 1
        want.append(np.average(STATES[b][shown], 0, np.array(words)[IDS[b][shown]]))
    np.testing.assert_allclose(pooled(SentencePooling(before=(WordWeights(words),)))[0], want, rtol=1e-5)


@pytest.mark.parametrize("width", [16, 4])
def test_dense_layers_add_their_input(width: int) -> None:
    found, w = pooled(SentencePooling(after=(Dense(width, "tanh", residual=True),)))
    mean = pooled(SentencePooling())[0]
    weights = {name.rpartition("after_0.")[2]: array for name, array in w.items()}
    skipped = mean if width == 16 else mean @ weights["residual.weight"].T
    want = np.tanh(mean @ weights["linear.weight"].T + weights["linear.bias"]) + skipped
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_normalized_vectors_have_unit_length() -> None:
    found = pooled(SentencePooling(normalize=True))[0]
    mean = pooled(SentencePooling())[0]
    np.testing.assert_allclose(found, mean / np.linalg.norm(mean, axis=1, keepdims=True), rtol=1e-6)
    graph = trace(lambda x: UnitLength()(x), {"x": X})
    zeros = run(graph, {"x": np.zeros((1, 1, 16))}, "interpreter")["output"]
    np.testing.assert_array_equal(zeros, np.zeros((1, 1, 16)))


def test_facts_state_what_encode_needs() -> None:
    assert SentencePooling("cls", normalize=True).facts == {"pooling": "cls", "normalize": True}
    assert SentencePooling("cls", after=(UnitLength(),)).facts == SentencePooling("token").facts == {}
    assert SentencePooling("end").facts == {"padding": "max_length"}


@pytest.mark.parametrize("mode", ["sum", (), ("mean", "token")])
def test_other_modes_are_refused(mode: Any) -> None:
    with pytest.raises(WeftError, match=r"mode=.* must be of cls, max, mean"):
        SentencePooling(mode)

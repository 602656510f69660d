"""Sampling against transformers' logits processors, and the draws against their own probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from weft.backends.runtime.sampling import Sampler, Sampling
from weft.ir.errors import WeftError

CASES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.7, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_k": 10_000},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.31},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.07},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "repetition_penalty": 0.6, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
]


def reference(options: dict[str, Any], prompt: list[int], logits: np.ndarray) -> np.ndarray:
    """The processors that transformers' generate would build, in its order."""
    processors = LogitsProcessorList()
    if "repetition_penalty" in options:
        processors.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if options["temperature"] != 1:
        processors.append(TemperatureLogitsWarper(options["temperature"]))
    if "top_k" in options:
        processors.append(TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        processors.append(TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        processors.append(MinPLogitsWarper(options["min_p"]))
    return processors(torch.tensor([prompt]), torch.from_numpy(logits.copy())[None])[0].numpy()


@pytest.mark.parametrize("options", CASES, ids=lambda case: ",".join(f"{k}={v}" for k, v in case.items()))
@pytest.mark.parametrize("vocab", [2, 65, 1000])
def test_the_same_scores_as_transformers(options: dict[str, Any], vocab: int, rng: np.random.Generator) -> None:
    for spread in (0.5, 3.0, 12.0):
        logits = (spread * rng.standard_normal(vocab)).astype(np.float32)
        logits[rng.integers(vocab)] = -np.inf
        before = logits.copy()
        prompt = rng.integers(vocab, size=20).tolist()
        ids, scores = Sampler(Sampling(**options), prompt).candidates(logits)
        found = np.full(vocab, -np.inf, np.float32)
        found[ids] = scores
        np.testing.assert_allclose(found, reference(options, prompt, logits), rtol=4 * 2**-24)
        np.testing.assert_array_equal(logits, before)


def test_ties_at_the_border_of_top_k_are_all_kept() -> None:
    logits = np.array([1, 2, 2, 2, 0], np.float32)
    ids, _ = Sampler(Sampling(temperature=1, top_k=2), []).candidates(logits)
    assert ids.tolist() == [1, 2, 3]


def test_greedy_takes_the_most_likely_and_ignores_filters(rng: np.random.Generator) -> None:
    logits = rng.standard_normal(100).astype(np.float32)
    for options in ({}, {"top_k": 3}, {"top_p": 0.1, "min_p": 0.5}, {"seed": 4}):
        assert Sampler(Sampling(**options), [])(logits) == logits.argmax()


def test_the_repetition_penalty_remembers_what_was_drawn() -> None:
    logits = np.array([3, 2.9, 2.8, -1], np.float32)
    draw = Sampler(Sampling(repetition_penalty=1.2), [2, 77])  # 77: seen, but outside of these logits
    assert [draw(logits) for _ in range(3)] == [0, 1, 0]


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    draw = Sampler(Sampling(temperature=1, seed=0), [])
    count = 4000
    share = np.bincount([draw(logits) for _ in range(count)], minlength=4) / count
    np.testing.assert_allclose(share, [0.5, 0.3, 0.15, 0.05], atol=4 * np.sqrt(0.25 / count))


def test_rows_draw_on_their_own_and_seeds_repeat() -> None:
    logits = np.zeros(1000, np.float32)

    def draws(seed: int | None, row: int) -> list[int]:
        draw = Sampler(Sampling(temperature=1, seed=seed), [], row)
        return [draw(logits) for _ in range(10)]

    assert draws(3, 0) == draws(3, 0) == draws(1, 2)
    assert draws(3, 0) != draws(3, 1)
    assert draws(None, 0) != draws(None, 0)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 2.0}])
def test_broken_logits_are_refused(broken: float, options: dict[str, Any]) -> None:
    logits = np.zeros(10, np.float32)
    logits[:] = -np.inf if broken == -np.inf else 0
    logits[4] = broken
    with pytest.raises(WeftError, match="largest logit"):
        Sampler(Sampling(**options), [1])(logits)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, but it must be at least 0"),
        ({"temperature": float("nan")}, "temperature is nan, but it must be a finite number"),
        ({"temperature": "hot"}, "temperature is 'hot', but it must be a finite number"),
        ({"top_k": -1}, "top_k is -1, but it must be at least 0"),
        ({"top_k": 2.5}, "top_k is 2.5, but it must be a whole number"),
        ({"top_k": True}, "top_k is True, but it must be a whole number"),
        ({"top_p": 0.0}, "top_p is 0.0, but it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1, but it must be above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p is 1.5, but it must be between 0 and 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, but it must be above 0"),
        ({"seed": -5}, "seed is -5, but it must be at least 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(WeftError) as caught:
        Sampling(**options)
    assert words in str(caught.value)

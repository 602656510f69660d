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

from weft.backends.runtime.core.sampler import Sampler, Sampling
from weft.backends.torch.package.shipped.sampling import filter_logits
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
    """Apply the processors that transformers' generate would build, in its order."""
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
def test_scores_equal_transformers(options: dict[str, Any], vocab: int, rng: np.random.Generator) -> None:
    for spread in (0.5, 3.0, 12.0):
        logits = (spread * rng.standard_normal(vocab)).astype(np.float32)
        logits[rng.integers(vocab)] = -np.inf
        before = logits.copy()
        prompt = rng.integers(vocab, size=20).tolist()
        ids, scores = Sampler(Sampling(**options), prompt).filter_candidates(logits)
        found = np.full(vocab, -np.inf, np.float32)
        found[ids] = scores
        np.testing.assert_allclose(found, reference(options, prompt, logits), rtol=4 * 2**-24)
        np.testing.assert_array_equal(logits, before)


def test_ties_at_the_border_of_top_k_are_all_kept() -> None:
    logits = np.array([1, 2, 2, 2, 0], np.float32)
    ids, _ = Sampler(Sampling(temperature=1, top_k=2), []).filter_candidates(logits)
    assert ids.tolist() == [1, 2, 3]


def test_greedy_takes_the_most_likely_and_ignores_filters(rng: np.random.Generator) -> None:
    logits = rng.standard_normal(100).astype(np.float32)
    for options in ({}, {"top_k": 3}, {"top_p": 0.1, "min_p": 0.5}, {"seed": 4}):
        assert Sampler(Sampling(**options), [])(logits) == logits.argmax()


EXTREME = [1e-300, 1e-45, 1e-40, 1.2e-38, 1e-30, 1e-9]


def spread(rng: np.random.Generator) -> list[np.ndarray]:
    """Return logits around and far from 0, with masked tokens; the likeliest is not the last."""
    found = []
    for offset, width in ((0, 1), (500, 20), (-500, 20), (3e38, 1e37), (-3e38, 1e37)):
        logits = (offset + width * rng.standard_normal(50)).astype(np.float32)
        logits[:3] = -np.inf
        logits[7] = logits[3:].max() + abs(logits[3:].max()) * 2**-20 + 1e-3
        found.append(logits)
    return found


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"repetition_penalty": 1.0 + 1e-9}]
)
@pytest.mark.parametrize("temperature", EXTREME)
def test_low_temperature_limit_is_greedy(temperature: float, filters: dict[str, Any], rng: np.random.Generator) -> None:
    for logits in spread(rng):
        draw = Sampler(Sampling(temperature=temperature, seed=1, **filters), [1, 2])
        assert {draw(logits) for _ in range(8)} == {7}
        options = {k: v for k, v in filters.items() if k != "repetition_penalty"}
        p = filter_logits(torch.from_numpy(logits)[None], temperature, **options).softmax(-1)
        assert p.argmax() == 7 and p[0, 7] == 1


@pytest.mark.parametrize("temperature", [1e30, 1e39, 1e300])
def test_high_temperature_limit_is_uniform(temperature: float, rng: np.random.Generator) -> None:
    logits = rng.standard_normal(50).astype(np.float32)
    logits[:3] = -np.inf
    ids, scores = Sampler(Sampling(temperature=temperature), []).filter_candidates(logits)
    assert ids.size == 50 and np.ptp(scores[3:]) < 1e-20 and np.isneginf(scores[:3]).all()
    p = filter_logits(torch.from_numpy(logits)[None], temperature).softmax(-1)[0]
    np.testing.assert_allclose(p, [0.0] * 3 + [1 / 47] * 47, rtol=1e-6)


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e-20, 1e20, 1e39, 1e300])
def test_extreme_penalties_leave_numbers(penalty: float) -> None:
    logits = np.array([2, -2, 0, 1, -np.inf], np.float32)
    token = Sampler(Sampling(temperature=1, repetition_penalty=penalty, seed=1), [0, 1, 2])(logits)
    assert token == 0 if penalty < 1 else token in (0, 2, 3)


@pytest.mark.parametrize("top_p", [1e-300, 1e-45, 1e-20, 1e-9])
def test_smallest_nucleus_is_the_likeliest_token(top_p: float) -> None:
    for logits in (np.zeros(7, np.float32), np.arange(7, dtype=np.float32)):
        ids, _ = Sampler(Sampling(temperature=1, top_p=top_p), []).filter_candidates(logits)
        assert ids.size >= 1 and logits[ids].max() == logits.max()
        p = filter_logits(torch.from_numpy(logits)[None], top_p=top_p).softmax(-1)
        assert p.isfinite().all() and p.argmax() == p[0].nonzero()[-1]


def test_repetition_penalty_counts_drawn_tokens() -> None:
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

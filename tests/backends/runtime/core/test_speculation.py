"""Speculative decoding on both executors: the tokens are those without drafts, however right or wrong drafts are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.core.speculation import Drafter, Drafts, PromptLookup, Speculation, ThriftyDrafts
from weft.frontends import load_source
from weft.ir.errors import WeftError

from ....sampling import ALL
from ..stacks import CAREFUL, LATENT, LOCAL, PROMPTS, VOCAB, WIDE, tokens

SAMPLED: dict[str, Any] = {"temperature": 1.5, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.2}
LENGTH = 64


def built(
    blocks: Sequence[Any], folder: Path, target: str, passes: str = "default", seed: int = 5, vocab: int = VOCAB
) -> Path:
    model = weft.Decoder(vocab=vocab, dim=32, layers=list(blocks), context=LENGTH)
    weft.compile(load_source(model, seed=seed), folder, target=target, passes=passes)
    return folder


@pytest.fixture(scope="module", params=["ort-cpu", "onnx", "torch"])
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def every(target: str) -> str:
    """Return passes that leave the logits of all tokens."""
    return "default" if target == "torch" else "default,-last-token-logits"


@pytest.fixture(scope="module")
def folder(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built([WIDE, LATENT], tmp_path_factory.mktemp(target) / "out", target, every(target))


@pytest.fixture(scope="module")
def model(folder: Path) -> Generator:
    return weft.load(folder, device="cpu", trust=True)


class Guesses(Drafter):
    """Knows the answers, and gives some of their tokens and then wrong ones, by a generator of its own."""

    def __init__(self, answers: Sequence[Sequence[int]], seed: int) -> None:
        self.answers, self.rng = answers, np.random.default_rng(seed)

    def propose(self, text: Sequence[int], most: int) -> list[int]:
        (known,) = {tuple(a[len(text) :]) for a in self.answers if list(a[: len(text)]) == list(text)} or {()}
        drafted = list(known[: self.rng.integers(0, most + 1)])
        wrong = self.rng.integers(0, most + 1 - len(drafted))
        return drafted + self.rng.integers(0, VOCAB, wrong).tolist()


@pytest.mark.parametrize("options", [{}, {**SAMPLED, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["batch", "one"])
def test_right_and_wrong_drafts_give_the_same_tokens(
    model: Generator, prompts: list[list[int]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows accept different numbers of tokens, and end at different times."""
    plain = model.generate(prompts, max_tokens=25, prompt_lookup_num_tokens=0, **options)
    answers = [[*prompt, *result.tokens] for prompt, result in zip(prompts, plain, strict=True)]
    for seed in range(3):
        guesses = Guesses(answers, seed)
        monkeypatch.setattr(Speculation, "new_drafts", lambda self, _, guesses=guesses: Drafts(guesses, 6))
        found = model.generate(prompts, max_tokens=25, prompt_lookup_num_tokens=6, **options)
        assert tokens(found) == tokens(plain)
        times = found[0].timings
        assert 0 < times.accepted_tokens < times.drafted_tokens
        assert times.decoded_tokens == sum(len(result.tokens) - 1 for result in found)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_prompt_lookup(model: Generator, count: int) -> None:
    """Tiny models repeat themselves, so the text drafts what comes."""
    plain = model.generate(PROMPTS, max_tokens=40)
    found = model.generate(PROMPTS, max_tokens=40, prompt_lookup_num_tokens=count)
    assert tokens(found) == tokens(plain)
    assert found[0].timings.accepted_tokens > 10


def test_assistant_drafts_give_the_same_tokens(model: Generator, folder: Path, target: str, tmp_path: Path) -> None:
    plain = model.generate(PROMPTS, max_tokens=20)
    same = model.generate(PROMPTS, max_tokens=20, assistant=weft.load(folder, device="cpu", trust=True))
    assert tokens(same) == tokens(plain)
    assert same[0].timings.accepted_tokens == same[0].timings.drafted_tokens > 0
    other = weft.load(built([WIDE], tmp_path / "small", target, seed=9), device="cpu", trust=True)
    assert tokens(model.generate(PROMPTS, max_tokens=20, assistant=other, num_assistant_tokens=3)) == tokens(plain)


def test_sampling_has_the_same_distribution(model: Generator) -> None:
    """With a seed even the same tokens; over many, the frequencies of the model's own probabilities."""
    prompt, draws = [5, 9, 5, 9, 5, 9], 400 if ALL else 150
    options: dict[str, Any] = {"max_tokens": 2, "temperature": 2.0, "top_k": 4, "prompt_lookup_num_tokens": 4}
    found = [model.generate([prompt], seed=seed, **options)[0].tokens for seed in range(draws)]
    first = max({t[0] for t in found}, key=[t[0] for t in found].count)
    after = [t[1] for t in found if t[0] == first]
    logits = model.logits([*prompt, first])[-1].astype(np.float64) / 2.0
    best = np.argsort(-logits)[:4]
    p = np.exp(logits[best]) / np.exp(logits[best]).sum()
    seen = np.array([after.count(int(t)) for t in best])
    assert seen.sum() == len(after)
    assert ((seen - len(after) * p) ** 2 / (len(after) * p)).sum() < 16.3  # χ² of 3 degrees: one in a thousand is above


@pytest.mark.parametrize("most", [1, 2, 3, 57, None])
def test_length_limits_are_the_same_with_drafts(model: Generator, most: int | None) -> None:
    """At a number of tokens, and where the model's length ends."""
    prompt = PROMPTS[0]
    (plain,) = model.generate([prompt], max_tokens=most, prompt_lookup_num_tokens=0)
    for count in (1, 5, 50):
        (found,) = model.generate([prompt], max_tokens=most, prompt_lookup_num_tokens=count)
        assert (found.tokens, found.finish) == (plain.tokens, plain.finish)


def test_accepted_stop_token_ends_the_answer(folder: Path) -> None:
    model = weft.load(folder, device="cpu", trust=True)
    (plain,) = model.generate([PROMPTS[0]], max_tokens=40, prompt_lookup_num_tokens=0)
    last = plain.tokens[-1]
    model.stop_ids = frozenset({last})
    (found,) = model.generate([PROMPTS[0]], max_tokens=40, prompt_lookup_num_tokens=8)
    assert found.tokens == plain.tokens[: plain.tokens.index(last) + 1] and found.finish == "stop"


def test_models_that_cannot_verify_drafts_are_refused(model: Generator, target: str, tmp_path: Path) -> None:
    assert "rolling" in CAREFUL
    rolls = "ort-cpu" if target == "onnx" else target  # caches that grow drop tokens
    rolling = weft.load(built([LOCAL, LOCAL], tmp_path / "rolling", rolls, every(rolls)), device="cpu", trust=True)
    with pytest.raises(WeftError, match="states and rolling caches cannot drop tokens"):
        rolling.generate(PROMPTS, prompt_lookup_num_tokens=2)
    with pytest.raises(WeftError, match="the assistant cannot drop rejected tokens"):
        model.generate(PROMPTS, assistant=rolling)
    other = weft.load(built([WIDE], tmp_path / "other", target, vocab=VOCAB + 1), device="cpu", trust=True)
    with pytest.raises(WeftError, match=f"the assistant has {VOCAB + 1} tokens, but the model has {VOCAB}"):
        model.generate(PROMPTS, assistant=other)
    for options, words in (
        ({"prompt_lookup_num_tokens": -1}, "prompt_lookup_num_tokens is -1, but it must be a whole number"),
        ({"assistant": model, "num_assistant_tokens": 0}, "num_assistant_tokens is 0, but it must be a whole number"),
        (
            {"assistant": model, "prompt_lookup_num_tokens": 3},
            "but there is an assistant too, and only one can draft",
        ),
        ({"beams": 2, "prompt_lookup_num_tokens": 3}, "a beam search cannot draft tokens"),
        ({"num_assistant_tokens": 3}, "num_assistant_tokens is 3, but there is no assistant: set one"),
    ):
        with pytest.raises(WeftError, match=words):
            model.generate(PROMPTS, **options)
    if target != "torch":
        short = weft.load(built([WIDE], tmp_path / "short", "onnx"), device="cpu")
        with pytest.raises(WeftError, match='compile it with --passes "default,-last-token-logits"'):
            short.generate(PROMPTS, prompt_lookup_num_tokens=2)


def test_single_greedy_answers_have_drafts_by_default_in_onnx_runtime(target: str, tmp_path: Path) -> None:
    """Also in a folder of ort-cpu whose logits are those of the last token."""
    passes = every(target) if target == "onnx" else "default"
    model = weft.load(built([WIDE, LATENT], tmp_path / "out", target, passes), device="cpu", trust=True)
    plain = model.generate(PROMPTS[0], max_tokens=50, prompt_lookup_num_tokens=0)
    assert plain[0].timings.drafted_tokens == 0
    drafted = model.generate(PROMPTS[0], max_tokens=50)
    assert tokens(drafted) == tokens(plain)
    timings = drafted[0].timings
    assert (timings.accepted_tokens > 0) == (timings.drafted_tokens > 0) == (target != "torch")
    for prompts, options in (
        (PROMPTS[:2], {}),
        (PROMPTS[:1], {"temperature": 0.1, "seed": 1}),
        (PROMPTS, {"beams": 2}),
    ):
        found = model.generate(prompts, max_tokens=50, **options)
        assert found[0].timings.drafted_tokens == 0


@pytest.mark.parametrize("cost", [0.0, 0.1, 0.3, 0.8])
def test_default_drafts_save_time_or_cost_a_hundredth_at_most(cost: float) -> None:
    """Simulate models whose calls take 1 + `cost` steps per drafted token, on texts that repeat more or less."""
    rng, saved = np.random.default_rng(0), []
    unseen = rng.integers(0, 40, 3000).tolist()  # pairs of tokens recur, but not what follows
    repeated = np.concatenate([rng.integers(0, 40, 60).tolist() * 8 for _ in range(4)]).tolist()
    for text in (unseen, repeated, unseen[:500] + repeated[:960] + unseen[500:], repeated[:300] + unseen):
        drafts, at, seconds = ThriftyDrafts(), 1, 0.0
        while at < len(text):
            draft = drafts.propose(text[:at], len(text) - at - 1)
            right = next((i for i, t in enumerate(draft) if t != text[at + i]), len(draft))
            drafts.record(len(draft), right, 0.01 * (1 + cost * len(draft)))
            seconds, at = seconds + 0.01 * (1 + cost * len(draft)), at + right + 1
        plain = 0.01 * (len(text) - 1)
        assert seconds <= 1.01 * plain + 0.02
        saved.append(plain / seconds)
    assert saved[1] > 0.8 * min(9 / (1 + 8 * cost), 3)


def test_prompt_lookup_proposes_the_last_longest_match() -> None:
    lookup = PromptLookup()
    assert lookup.propose([1, 2, 3, 4], 5) == []  # nothing occurred twice
    assert lookup.propose([1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
    assert lookup.propose([1, 2, 3, 4, 1, 2, 7, 1, 2], 2) == [7, 1]  # the last occurrence
    assert lookup.propose([1, 2, 3, 4, 1, 2, 7, 1, 2, 3, 4], 2) == [1, 2]  # the longest match
    assert PromptLookup().propose([5, 6, 5, 6], 7) == [5, 6, 5, 6, 5, 6, 5]  # a text that repeats goes on


def test_draft_length_adapts_to_accepted_tokens() -> None:
    class Counting(Drafter):
        def propose(self, text: Sequence[int], most: int) -> list[int]:
            return [0] * most

    drafts = Drafts(Counting(), 8)
    assert len(drafts.propose([], 100)) == 8
    assert len(drafts.propose([], 3)) == 3
    for accepted, count in ((2, 3), (1, 2), (2, 4), (3, 4), (4, 8), (8, 8)):
        drafts.record(len(drafts.propose([], 100)), accepted, 0.1)
        assert len(drafts.propose([], 100)) == count


def test_failed_drafts_pause_drafting() -> None:
    class Counting(Drafter):
        def propose(self, text: Sequence[int], most: int) -> list[int]:
            return [0] * most

    drafts, rests = Drafts(Counting(), 8), []
    for accepted in (0, 0, 0, 0, 0, 0, 1, 0):
        drafts.record(len(drafts.propose([], 100)), accepted, 0.1)
        rests.append(0)
        while not drafts.propose([], 100):
            rests[-1] += 1
    assert rests == [1, 2, 4, 8, 16, 16, 0, 1]


def test_assistant_releases_its_caches(model: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    new_context = model.decoder.new_context

    def noted(batch: int, capacity: int) -> Any:
        context = new_context(batch, capacity)
        monkeypatch.setattr(context, "close", lambda: closed.append(context))
        return context

    monkeypatch.setattr(model.decoder, "new_context", noted)
    model.decoder._spare = None
    model.generate([[1, 2, 3]], max_tokens=4, assistant=model)
    assert len(closed) == 1  # the other one is kept for the next call

"""Answers in progress: how they end, their text and log-probabilities, and drafts that are verified."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.backends.runtime.core.answers import Answer, add_tokens, compute_logprobs, verify_drafts
from weft.backends.runtime.core.results import Timings
from weft.backends.runtime.core.sampler import Sampler, Sampling, TokenRules
from weft.backends.runtime.core.speculation import Drafter, Drafts
from weft.backends.runtime.text.tokenizer import Tokenizer

from ..sums import VOCAB, SumContext, continue_sums
from ..text.scripted import byte_level, ids


def new_answer(limit: int = 9, stop: Sequence[int] = (), tokenizer: Tokenizer | None = None, **options: Any) -> Answer:
    stops = options.pop("stops", ())
    rules = options.pop("forced", TokenRules())
    sampler = Sampler(Sampling(), [])
    return Answer([1, 2], [1, 2], limit, frozenset(stop), sampler, rules, tokenizer, stops, **options)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


def test_answer_ends_with_a_stop_token_or_at_its_limit() -> None:
    answer = new_answer(3, stop=[7])
    assert [answer.add_token(token) for token in (4, 7)] == [4, 7]
    assert answer.result.finish == "stop" and answer.result.tokens == [4, 7]
    answer = new_answer(2, stop=[7])
    answer.add_token(4)
    assert answer.result.finish is None
    answer.add_token(4)
    assert answer.result.finish == "length"


def test_answer_ends_before_a_stop_string(tokenizer: Tokenizer) -> None:
    answer = new_answer(99, tokenizer=tokenizer, stops=["two"])
    pieces = []
    for token in ids("one two three"):
        answer.add_token(token)
        pieces.append(answer.pop_text())
        if answer.result.finish:
            break
    assert "".join(pieces) == answer.result.text == "one " and answer.result.finish == "stop_string"
    assert len(answer.result.tokens) == len("one two") and answer.pop_text() == ""


def test_withheld_text_is_added_at_the_end(tokenizer: Tokenizer) -> None:
    answer = new_answer(2, tokenizer=tokenizer, stops=["abc"])
    for token in ids("ab"):
        answer.add_token(token)
    assert (answer.result.text, answer.result.finish) == ("ab", "length")


def test_constraint_masks_logits_and_ends_the_answer() -> None:
    class TwoEvens:
        def __init__(self) -> None:
            self.accepted: list[int] = []

        @property
        def is_complete(self) -> bool:
            return len(self.accepted) == 2

        def mask_logits(self, logits: Any) -> Any:
            return np.where(np.arange(logits.size) % 2 == 0, logits, -np.inf)

        def accept_token(self, token: int) -> None:
            self.accepted.append(token)

    answer = new_answer(constraint=TwoEvens())
    logits = np.arange(4, dtype=np.float32)
    assert [answer.draw_token(logits), answer.draw_token(logits)] == [2, 2]
    assert answer.result.finish == "stop"


def test_forced_token_comes_before_the_logits() -> None:
    answer = new_answer(2, forced=TokenRules(begin=((3,),), last=0))
    logits = np.arange(5, dtype=np.float32)
    assert [answer.draw_token(logits), answer.draw_token(logits)] == [3, 0]


def test_logprobs_are_the_log_softmax(rng: np.random.Generator) -> None:
    logits = (50 * rng.standard_normal(40) + 300).astype(np.float32)
    exact = logits.astype(np.float64)
    exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    entry = compute_logprobs(logits, 5, 3)
    best = np.argsort(-exact)[:3]
    assert entry.token == 5 and entry.logprob == pytest.approx(exact[5], abs=1e-4)
    assert [token for token, _ in entry.top] == best.tolist()
    assert [value for _, value in entry.top] == pytest.approx(exact[best], abs=1e-4)
    assert compute_logprobs(logits, 5, 0).top == () and len(compute_logprobs(logits, 5, 99).top) == 40


def test_equal_logprobs_are_in_order_of_tokens() -> None:
    assert [token for token, _ in compute_logprobs(np.zeros(3, np.float32), 0, 3).top] == [0, 1, 2]


def test_tokens_are_added_to_active_rows() -> None:
    rows = [new_answer(1), new_answer(5), new_answer(5)]
    tokens, active = np.zeros(3, np.int64), np.array([True, False, True])
    assert add_tokens(rows, Answer.add_token, np.array([4, 5, 6]), tokens, active) == 2
    assert tokens.tolist() == [4, 0, 6] and active.tolist() == [False, False, True]  # the first row is at its limit


class Guess(Drafter):
    """Drafts the right tokens, except every `wrong`-th token of the sequence."""

    def __init__(self, wrong: int) -> None:
        self.wrong = wrong

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        right = continue_sums(tokens, most)
        return [(t + ((len(tokens) + i) % self.wrong == 0)) % VOCAB for i, t in enumerate(right)]


@pytest.mark.parametrize("wrong", [1, 3, 1000])
def test_verified_drafts_are_the_tokens_of_the_model(wrong: int) -> None:
    prompts = [[1, 2], [5]]
    context = SumContext(2, 64)
    rows = [
        Answer(p, p, limit, frozenset(), Sampler(Sampling(), []), TokenRules(), None, ())
        for p, limit in zip(prompts, (14, 9), strict=True)
    ]
    timings = Timings()
    for row in rows:
        row.result.timings = timings
    drafts, tokens, active = [Drafts(Guess(wrong), 4) for _ in rows], np.zeros(2, np.int64), np.ones(2, np.bool_)
    add_tokens(rows, Answer.draw_token, context.prefill(prompts), tokens, active)
    while active.any():
        if not verify_drafts(context, rows, drafts, tokens, active):  # nothing is drafted
            scores = context.step(tokens, active)
            timings.decoded_tokens += add_tokens(rows, Answer.draw_token, scores, tokens, active)
    assert [row.result.tokens for row in rows] == [continue_sums([1, 2], 14), continue_sums([5], 9)]
    assert timings.decoded_tokens == 13 + 8
    assert timings.accepted_tokens <= timings.drafted_tokens
    assert (timings.accepted_tokens == 0) == (wrong == 1)
    if wrong == 1000:
        assert timings.accepted_tokens == timings.drafted_tokens > 0 and len(context.calls) + len(context.steps) < 8

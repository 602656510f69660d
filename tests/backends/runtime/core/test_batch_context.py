"""Batch contexts: which prompts run together, and what rows have cached after every kind of call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.backends.runtime.core.batch_context import split_chunks
from weft.ir import WeftError

from ..sums import SumContext, continue_sums

PROMPTS = [[1, 2, 3], [4], [5, 6]]


def drawn(scores: Any) -> list[int]:
    """Return the likeliest token of each row."""
    assert np.isfinite(scores).all()
    return [int(token) for token in scores.argmax(-1)]


def wanted(*rows: list[int]) -> list[int]:
    return [continue_sums(row, 1)[0] for row in rows]


@pytest.mark.parametrize(
    ("padded", "chunk", "calls"),
    [
        (True, 512, [(0, (3, 1, 2))]),
        (True, 6, [(0, (3, 1)), (2, (2,))]),  # three rows of three tokens are more than six
        (True, 2, [(0, (2,)), (0, (1,)), (1, (1,)), (2, (2,))]),  # the first prompt runs in pieces
        (False, 512, [(0, (3,)), (1, (1,)), (2, (2,))]),
    ],
)
def test_prompts_are_grouped_by_tokens_of_a_call(padded: bool, chunk: int, calls: list[Any]) -> None:
    context = SumContext(3, 8, padded=padded)
    assert drawn(context.prefill(PROMPTS, chunk)) == wanted(*PROMPTS)
    assert context.calls == calls and context.lengths.tolist() == [3, 1, 2]


def test_equal_prompts_run_together_without_padding() -> None:
    context = SumContext(3, 8, padded=False)
    context.prefill([[1, 2], [3, 4], [5]])
    assert context.calls == [(0, (2, 2)), (2, (1,))]


def test_prompts_are_copied_to_adjacent_rows() -> None:
    context = SumContext(4, 8)
    assert drawn(context.prefill([[1, 2], [7]])) == wanted([1, 2], [1, 2], [7], [7])
    assert context.lengths.tolist() == [2, 2, 1, 1] and context.calls == [(0, (2, 1))]


def test_step_advances_active_rows_only() -> None:
    context = SumContext(3, 8)
    context.prefill(PROMPTS)
    scores = context.step([9, 8, 7], np.array([True, False, True]))
    assert drawn(scores[[0, 2]]) == wanted([1, 2, 3, 9], [5, 6, 7])
    assert context.lengths.tolist() == [4, 1, 3] and context.steps == [[0, 2]]
    assert drawn(context.step_first(np.array([1, 1]))) == wanted([1, 2, 3, 9, 1], [4, 1])
    assert context.lengths.tolist() == [5, 2, 3]


def test_full_caches_are_refused() -> None:
    context = SumContext(2, 3)
    context.prefill([[1, 2, 3], [4]])
    with pytest.raises(WeftError, match="the cache is full with 3 tokens in a row"):
        context.step([1, 1])
    context.step([0, 1], np.array([False, True]))  # the full row rests
    with pytest.raises(WeftError, match="5 tokens in a row do not fit the cache of 3"):
        context.append(1, [[1, 1, 1]])


def test_extend_returns_logits_of_every_token() -> None:
    context = SumContext(1, 8)
    context.extend([1, 2])
    assert drawn(context.extend([3, 4])) == wanted([1, 2, 3], [1, 2, 3, 4])


def test_rows_without_new_tokens_rest() -> None:
    context = SumContext(2, 8)
    context.prefill([[1, 2], [3]])
    first, second = context.extend_all([[], [5, 6]])
    assert first.shape == (0, 11) and drawn(second) == wanted([3, 5], [3, 5, 6])
    assert context.lengths.tolist() == [2, 3]
    assert drawn(context.step([4, 4])) == wanted([1, 2, 4], [3, 5, 6, 4])


def test_rewound_tokens_are_dropped() -> None:
    context = SumContext(2, 8)
    context.prefill([[1, 2, 3], [4, 5]])
    context.rewind(np.array([2, 1]))
    assert drawn(context.step([7, 7])) == wanted([1, 2, 7], [4, 7])


@pytest.mark.parametrize(
    ("can_rewind", "prompt", "count"),
    [
        (True, [1, 2, 3, 9, 9], 3),
        (True, [1, 2, 9, 9], 2),  # the third token is dropped
        (True, [1, 2, 3], 2),  # the last token must run
        (True, [8], 0),
        (False, [1, 2, 3, 9], 3),
        (False, [1, 2, 9, 9], 0),
    ],
)
def test_common_prefix_is_cached(can_rewind: bool, prompt: list[int], count: int) -> None:
    context = SumContext(1, 8, can_rewind=can_rewind)
    context.prefill([[1, 2, 3]])
    assert context.count_cached(prompt) == count
    assert drawn(context.prefill([prompt], keep=count)) == wanted(prompt)
    assert context.calls[-1] == (0, (len(prompt) - count,))


def test_interrupted_step_leaves_nothing_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SumContext(1, 8)
    context.prefill([[1, 2, 3]])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(context, "_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            context.step([1])
    assert context.count_cached([1, 2, 3, 4]) == 0
    context.reset()
    context.prefill([[1, 2]])
    assert context.count_cached([1, 2, 3]) == 2


def test_rows_are_cleared_copied_and_gathered() -> None:
    context = SumContext(3, 8)
    context.prefill(PROMPTS)
    context.copy_row(0, 1)
    context.clear_row(2)
    assert drawn(context.append(2, [[6, 6]])) == wanted([6, 6])
    context.gather_rows(np.array([2, 0, 1]))
    assert drawn(context.step([1, 1, 1])) == wanted([6, 6, 1], [1, 2, 3, 1], [1, 2, 3, 1])


def test_larger_context_continues_where_the_old_one_was() -> None:
    old, new = SumContext(2, 4), SumContext(2, 8)
    old.prefill([[1, 2, 3, 4], [5]])
    new.copy_from(old)
    assert drawn(new.step([6, 6])) == wanted([1, 2, 3, 4, 6], [5, 6])


def test_prompts_are_split_into_chunks() -> None:
    assert list(split_chunks([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4], [5]]
    assert list(split_chunks([], 2)) == []

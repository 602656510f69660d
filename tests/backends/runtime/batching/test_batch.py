"""Batches of answers: waiting ones, errors of single answers, and the kind of batch that a decoder allows."""

from __future__ import annotations

import numpy as np
import pytest

from weft.backends.runtime.batching import RunningBatch, StaticBatch, new_batch
from weft.backends.runtime.batching.batch import draw_token
from weft.backends.runtime.core.generation import Generator
from weft.ir import WeftError

from ..sums import VOCAB, SumDecoder, continue_sums
from .batches import run


def test_answers_wait_for_free_rows() -> None:
    model = Generator(SumDecoder())
    batch, prompts = RunningBatch(model.decoder, 2), [[1], [2, 3], [4], [5, 6, 7]]
    given = [model.answer(prompt, max_tokens=4) for prompt in prompts]
    for answer in given:
        batch.join(answer)
    assert len(batch) == 4 and batch.active == [] and list(batch.waiting) == given
    batch.advance()
    assert batch.active == given[:2] and list(batch.waiting) == given[2:]
    run(batch, [])
    assert [answer.result.tokens for answer in given] == [continue_sums(prompt, 4) for prompt in prompts]
    assert batch.read_tokens == sum(map(len, prompts))


def test_closed_batch_is_empty_and_used_again() -> None:
    model = Generator(SumDecoder())
    batch = RunningBatch(model.decoder, 1)
    for prompt in ([1], [2]):
        batch.join(model.answer(prompt, max_tokens=9))
    batch.advance()
    batch.close()
    assert len(batch) == 0 and batch.advance() == []
    answer = model.answer([3], max_tokens=2)
    run(batch, [answer])
    assert answer.result.tokens == continue_sums([3], 2)


@pytest.mark.parametrize("most", [0, -1, 1.5])
def test_batch_of_no_rows_is_refused(most: int) -> None:
    with pytest.raises(WeftError, match=f"most is {most}, but it must be a whole number of at least 1"):
        RunningBatch(SumDecoder(), most)


def test_encoder_decoders_get_static_batches() -> None:
    assert isinstance(new_batch(SumDecoder(start=0), 2), StaticBatch)
    batch = new_batch(SumDecoder(), 2, quantum=7)
    assert isinstance(batch, RunningBatch) and batch.quantum == 7


def test_error_of_a_draw_is_kept_by_its_answer() -> None:
    answer = Generator(SumDecoder()).answer([1], max_tokens=2)
    logits = np.zeros(VOCAB, np.float32)
    assert draw_token(answer, logits) and answer.error is None
    logits[4] = np.nan
    assert not draw_token(answer, logits)
    assert "computed nan as its largest logit" in str(answer.error)
    assert answer.result.tokens == [0] and answer.result.finish is None

"""Batches of answers: waiting ones, errors of single answers, and the kind of batch that a decoder allows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import weft
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.backends.runtime.batching import RunningBatch, StaticBatch, new_batch
from weft.backends.runtime.batching.batch import draw_token
from weft.backends.runtime.core.generation import Generator
from weft.frontends import load_source
from weft.ir import WeftError

from ..sums import SumDecoder, continue_sums
from .batches import VOCAB, alone, answers, block, run


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


def test_encoder_decoder_runs_in_static_batches(tmp_path: Path) -> None:
    from weft import CrossAttention, Encoder, EncoderDecoder

    half = {"dim": 16, "layers": 1}
    encoder = Encoder(vocab=VOCAB, **half, block=block(Attention(heads=2, rope=RoPE())))
    decoder = Decoder(
        vocab=VOCAB,
        **half,
        block=Block(Attention(heads=2, rope=RoPE()), GatedMLP(24), RMSNorm(), cross=CrossAttention(heads=2)),
    )
    source = EncoderDecoder(encoder, decoder)
    weft.compile(load_source(source), tmp_path / "out", max_length=64)
    model = weft.load(tmp_path / "out")
    assert isinstance(model, Generator)
    batch = new_batch(model.decoder, 3)
    assert isinstance(batch, StaticBatch)
    given = answers(model)
    run(batch, given, 4)
    assert [answer.result.tokens for answer in given] == alone(model)
    given = answers(model)[:3]
    for answer in given:
        batch.join(answer)
    batch.advance()
    for answer in given:
        batch.leave(answer)
    assert not len(batch) and batch.advance() == []


def test_next_batch_begins_when_the_last_answer_has_ended() -> None:
    model = Generator(SumDecoder())
    batch = StaticBatch(model.decoder, 2)
    prompts, lengths = [[1], [2, 3], [4]], [2, 5, 1]
    given = [model.answer(prompt, max_tokens=n) for prompt, n in zip(prompts, lengths, strict=True)]
    for answer in given:
        batch.join(answer)
    assert batch.advance() == given[:2] and batch.active == given[:2] and len(batch) == 3
    assert batch.advance() == given[:2] and batch.active == given[1:2]  # a free row stays free
    while batch.active:
        batch.advance()
    assert batch.advance() == given[2:] and not len(batch)
    wanted = [continue_sums(prompt, n) for prompt, n in zip(prompts, lengths, strict=True)]
    assert [answer.result.tokens for answer in given] == wanted

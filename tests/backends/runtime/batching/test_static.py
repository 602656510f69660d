"""Static batches of encoder-decoders: answers begin together, and the next batch begins when the last has ended."""

from __future__ import annotations

from pathlib import Path

import weft
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.backends.runtime.batching import StaticBatch, new_batch
from weft.backends.runtime.core.generation import Generator
from weft.frontends import load_source

from ..sums import SumDecoder, continue_sums
from .batches import VOCAB, alone, answers, block, run


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

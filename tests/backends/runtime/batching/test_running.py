"""Answers that join and leave a batch between steps: each is the one that its prompt gets alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft import Attention, Decoder, RoPE
from weft.backends.runtime.batching import RunningBatch, new_batch
from weft.backends.runtime.compiled_folder import read_facts
from weft.backends.runtime.core.decoder import STEP
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.core.sampler import Sampling
from weft.backends.runtime.ort.ort_decoder import OrtDecoder
from weft.backends.runtime.ort.session import Session, import_onnxruntime, open_session
from weft.frontends import load_source
from weft.frontends.dsl import LinearAttention, Mamba, Mamba2
from weft.ir.errors import WeftError

from ....sampling import each
from ..pretended import Device
from .batches import LENGTHS, PROMPTS, VOCAB, alone, answers, block, run

ROPED = {"heads": 4, "kv_heads": 2, "rope": RoPE(100.0)}
STACKS = {
    "caches": [block(Attention(**ROPED)), block(Attention(**ROPED))],
    "rolling": [block(Attention(**ROPED, window=8)), block(Attention(**ROPED))],
    "states": [block(Mamba(64, state=4)), block(Mamba2(64, heads=4, state=8))],
    "hybrid": [block(LinearAttention(heads=4)), block(Attention(**ROPED))],
}


@pytest.fixture(scope="module", params=STACKS)
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of one model by target."""
    home = tmp_path_factory.mktemp("stack")
    model = Decoder(vocab=VOCAB, dim=32, layers=STACKS[request.param], context=320)
    for target in ("ort-cpu", "torch"):
        weft.compile(load_source(model), home / target, target=target)
    return {target: home / target for target in ("ort-cpu", "torch")}


@pytest.mark.parametrize(("target", "compact"), each(3, itertools.product(("ort-cpu", "torch"), (True, False))))
def test_batched_answers_equal_answers_alone(
    stack: dict[str, Path], target: str, compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows join while others decode, move, and read prompts in chunks between steps; caches grow on the way."""
    monkeypatch.setattr("weft.backends.runtime.batching.running.PROMPT_CHUNK", {"cpu": 12})
    monkeypatch.setattr("weft.backends.runtime.core.decoder.STEP", {"cpu": 8})
    model = weft.load(stack[target], trust=True)
    assert isinstance(model, Generator)
    model.decoder.chunk = 16
    batch = RunningBatch(model.decoder, 4, compact=compact)
    given = answers(model)
    run(batch, given)
    assert [answer.result.tokens for answer in given] == alone(model)
    assert all(answer.result.finish == "length" and answer.error is None for answer in given)
    assert batch.read_tokens == sum(map(len, PROMPTS))


def test_long_answers_are_preempted_after_a_quantum(stack: dict[str, Path]) -> None:
    """Two rows, four answers: none waits for the end of another, and what was set aside goes on where it was."""
    model = weft.load(stack["ort-cpu"])
    assert isinstance(model, Generator)
    batch = RunningBatch(model.decoder, 2, quantum=5)
    prompts = PROMPTS[:4]
    given = [model.answer(prompt, max_tokens=40) for prompt in prompts]
    for answer in given:
        batch.join(answer)
    while not all(answer.result.tokens for answer in given):
        batch.advance()
    assert not any(answer.result.finish for answer in given)
    assert max(len(answer.result.tokens) for answer in given) < 20
    run(batch, [])
    assert [a.result.tokens for a in given] == [model.generate([p], max_tokens=40)[0].tokens for p in prompts]


@pytest.fixture(scope="module", params=["ort-cpu", "onnx"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator:
    """Return a model whose caches are written in place, or grow."""
    folder = tmp_path_factory.mktemp("model") / "out"
    source = load_source(Decoder(vocab=VOCAB, dim=32, layers=STACKS["caches"], context=64))
    passes = "default" if request.param == "ort-cpu" else "default,-last-token-logits"
    weft.compile(source, folder, target=request.param, passes=passes)
    found = weft.load(folder)
    assert isinstance(found, Generator)
    return found


def test_leaving_answer_frees_its_row(model: Generator) -> None:
    batch = new_batch(model.decoder, 2)
    given = answers(model)[2:6]
    for answer in given:
        batch.join(answer)
    batch.advance()
    batch.leave(given[0])  # in a row
    batch.leave(given[3])  # in the queue
    batch.leave(given[3])
    run(batch, [])
    assert given[0].result.finish is None and len(given[0].result.tokens) < LENGTHS[2]
    assert given[3].result.tokens == []
    assert [answer.result.tokens for answer in given[1:3]] == alone(model)[3:5]


def test_rows_have_sampling_options_of_their_own(model: Generator) -> None:
    ways = [
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=0.7, top_k=9, seed=3),
        Sampling(),
        Sampling(frequency_penalty=2.0, presence_penalty=1.0),
        Sampling(logit_bias={7: 100.0}),
        Sampling(temperature=1.5, top_p=0.9, repetition_penalty=1.3, seed=8),
    ]
    given = [model.answer([1, 2, 3], max_tokens=12, sampling=way) for way in ways]
    run(RunningBatch(model.decoder, 6), given, 1)
    for way, answer in zip(ways, given, strict=True):
        single = model.answer([1, 2, 3], max_tokens=12, sampling=way)
        run(RunningBatch(model.decoder, 1), [single])
        assert answer.result.tokens == single.result.tokens
    assert given[4].result.tokens == [7] * 12
    assert len({tuple(answer.result.tokens) for answer in given}) == len(given)


def test_single_greedy_answer_has_drafts(model: Generator) -> None:
    """Drafts begin when the other row has ended, and end when another answer joins; tokens stay the same."""
    prompts, lengths = [[5, 9, 5, 9, 5, 9], [3, 2, 1], [40, 41]], [50, 6, 5]
    expected = [
        model.generate([p], max_tokens=n, prompt_lookup_num_tokens=0)[0].tokens
        for p, n in zip(prompts, lengths, strict=True)
    ]
    batch = new_batch(model.decoder, 2, prompt_lookup=8)
    given = [model.answer(p, max_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
    for answer in given[:2]:
        batch.join(answer)
    while given[1].result.finish is None:
        batch.advance()
        assert batch.drafted_tokens == 0
    while len(given[0].result.tokens) < 40:
        batch.advance()
    batch.join(given[2])
    run(batch, [])
    assert [answer.result.tokens for answer in given] == expected
    timings = given[0].result.timings
    assert batch.accepted_tokens == timings.accepted_tokens > 10
    assert batch.drafted_tokens == timings.drafted_tokens
    sampled = model.answer(prompts[0], max_tokens=50, sampling=Sampling(temperature=0.01, seed=1))
    run(batch, [sampled])
    assert sampled.result.timings.drafted_tokens == 0
    plain = new_batch(model.decoder, 2)
    run(plain, [model.answer(prompts[0], max_tokens=50)])
    assert plain.drafted_tokens == 0


def test_constraint_and_failed_draw_hold_for_drafts(model: Generator) -> None:
    class Alternating:
        """A language of 7 8 7 8 …, which fails after `most` tokens."""

        def __init__(self, most: int) -> None:
            self.count, self.most, self.is_complete = 0, most, False

        def mask_logits(self, logits: Any) -> Any:
            return np.where(np.arange(VOCAB) == 7 + self.count % 2, 0, -np.inf)

        def accept_token(self, token: int) -> None:
            self.count += 1
            if self.count == self.most:
                raise WeftError("no such token")

    batch = new_batch(model.decoder, 2, prompt_lookup=8)
    given = [model.answer([1, 2], max_tokens=40, constraint=Alternating(most)) for most in (99, 30)]
    for answer in given:
        run(batch, [answer])
    assert given[0].result.tokens == [7, 8] * 20 and given[0].error is None
    assert len(given[1].result.tokens) == 30 and str(given[1].error) == "no such token"
    assert all(answer.result.timings.accepted_tokens > 5 for answer in given)


class Evens:
    """A language of even tokens, which is complete after five."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def is_complete(self) -> bool:
        return self.count == 5

    def mask_logits(self, logits: Any) -> Any:
        changed = logits.copy()
        changed[1::2] = -np.inf
        return changed

    def accept_token(self, token: int) -> None:
        self.count += 1
        if token == 99:
            raise WeftError("no such token")


def test_constraint_of_a_row_does_not_change_other_rows(model: Generator) -> None:
    given = [*answers(model)[:3], model.answer([3, 3], max_tokens=20, constraint=Evens())]
    run(new_batch(model.decoder, 4), given, 4)
    assert [answer.result.tokens for answer in given[:3]] == alone(model)[:3]
    result = given[3].result
    assert len(result.tokens) == 5 and all(token % 2 == 0 for token in result.tokens) and result.finish == "stop"


def test_log_probabilities_are_those_of_the_logits(model: Generator) -> None:
    answer = model.answer([5, 6], max_tokens=6, logprobs=3, sampling=Sampling(temperature=2.0, seed=1))
    run(new_batch(model.decoder, 3), [answer, *answers(model)[:2]], 1)
    text = [5, 6]
    for token, entry in zip(answer.result.tokens, answer.result.logprobs, strict=True):
        logits = model.logits(text)[-1].astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert entry.token == token and entry.logprob == pytest.approx(expected[token], abs=1e-5)
        best = np.argsort(-expected)[:3]
        assert [i for i, _ in entry.top] == best.tolist()
        assert [p for _, p in entry.top] == pytest.approx(expected[best], abs=1e-5)
        text.append(token)


def test_failed_draw_ends_only_its_answer(model: Generator) -> None:
    class Nothing(Evens):
        def mask_logits(self, logits: Any) -> Any:
            return np.full_like(logits, -np.inf if self.count == 2 else 0)

    given = [model.answer([3, 3], max_tokens=20, constraint=Nothing()), *answers(model)[:3]]
    run(new_batch(model.decoder, 4), given, 4)
    assert given[0].error is not None and "no token can be chosen" in str(given[0].error)
    assert [answer.result.tokens for answer in given[1:]] == alone(model)[:3]


def test_out_of_memory_ends_only_the_longest_rows(model: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that cannot grow: the longest text ends with the reason, the others go on."""
    monkeypatch.setattr("weft.backends.runtime.core.decoder.STEP", {"cpu": 8})
    new_context = model.decoder.new_context

    def limited(batch: int, capacity: int) -> Any:
        if capacity > 16:
            raise WeftError("no memory for the caches")
        return new_context(batch, capacity)

    monkeypatch.setattr(model.decoder, "new_context", limited)
    batch = new_batch(model.decoder, 3)
    given = [model.answer(p, max_tokens=n) for p, n in (([1, 2, 3], 8), ([4, 5], 40), (list(range(30)), 4))]
    run(batch, given, 3)
    assert given[0].result.finish == "length" and len(given[0].result.tokens) == 8
    assert all("no memory" in str(answer.error) for answer in given[1:])
    assert len(given[1].result.tokens) == 15 and given[2].result.tokens == []


def test_simulated_cuda_device_gives_the_same_tokens(stack: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are computed at each step, by captured graphs, in memory that is reached only by copies."""
    real = weft.load(stack["ort-cpu"])
    assert isinstance(real, Generator)
    expected, facts = alone(real), read_facts(stack["ort-cpu"])
    device = Device(import_onnxruntime(), open_session(facts.model, threads=1, device="cpu").ort)
    device.pretend(monkeypatch)
    monkeypatch.setitem(STEP, "cuda", 8)
    monkeypatch.setattr("weft.backends.runtime.batching.running.PROMPT_CHUNK", {"cuda": 12})
    decoder = OrtDecoder(Session(device, "cuda", graphs=True), replace(facts, max_length=320))
    decoder.chunk = 16
    model, batch = Generator(decoder), new_batch(decoder, 4)
    given = answers(model)
    run(batch, given)
    assert [answer.result.tokens for answer in given] == expected
    assert len(set(device.graph_ids) - {"-1"}) >= 1

"""Stored prefixes: what is stored and loaded, and answers after it, which are those of prompts that run whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weft
from weft.backends.runtime.batching import RunningBatch
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.core.prefixes import BLOCK, PrefixCache
from weft.backends.runtime.core.sampler import Sampling
from weft.frontends import load_source
from weft.ir.errors import WeftError

from ....sampling import each
from ..batching.batches import run
from ..stacks import STACKS, VOCAB, stack
from ..sums import VOCAB as SUMS
from ..sums import WIDTH, SumContext, SumDecoder, continue_sums

BLOCK_BYTES = BLOCK * WIDTH * 8


def sequence(seed: int, length: int, vocab: int = SUMS) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, length)]


def ran(tokens: list[int], rewinds: bool = True) -> SumContext:
    """Return a context whose second row has cached `tokens`."""
    context = SumContext(3, 999, can_rewind=rewinds)
    context.append(1, [tokens])
    return context


class Prefixes:
    """A `PrefixCache` of one decoder."""

    def __init__(self, decoder: SumDecoder, limit: int = 1024) -> None:
        self.decoder, self.cache = decoder, PrefixCache(limit)

    def save(self, context: Any, row: int, prompt: int = 9999) -> None:
        self.cache.save(self.decoder, context, row, prompt)

    def load(self, context: SumContext, row: int, prompt: list[int]) -> int:
        return self.cache.load(self.decoder, context, row, prompt)

    def count(self, prompt: list[int]) -> int:
        return self.cache.count(self.decoder, prompt)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes


@pytest.mark.parametrize(
    ("common", "rest", "count"),
    [
        (200, 50, 3 * BLOCK),  # the block after the third is not complete
        (200, 0, 3 * BLOCK),
        (3 * BLOCK, 0, 2 * BLOCK),  # the last token must run
        (3 * BLOCK, 1, 2 * BLOCK),  # as two tokens
        (3 * BLOCK, 2, 3 * BLOCK),
        (100, 100, BLOCK),
        (BLOCK - 1, 9, 0),
    ],
)
def test_longest_common_prefix_is_loaded_in_blocks(common: int, rest: int, count: int) -> None:
    prefixes, first = Prefixes(SumDecoder()), sequence(0, 200)
    prefixes.save(ran(first), 1)
    prompt = [*first[:common], *((t + 1) % SUMS for t in [*first[common:], *sequence(1, rest)][:rest])]
    context = ran(sequence(2, 300))
    assert prefixes.count(prompt) == count
    assert prefixes.load(context, 1, prompt) == count
    assert (prefixes.cache.hits, prefixes.cache.tokens) == ((1, count) if count else (0, 0))
    if count:
        assert context.lengths.tolist() == [0, count, 0]
        assert context.append(1, [prompt[count:]]).argmax(-1).tolist() == continue_sums(prompt, 1)


def test_sequences_share_the_blocks_of_their_common_prefix() -> None:
    prefixes, first = Prefixes(SumDecoder()), sequence(0, 4 * BLOCK)
    prefixes.save(ran(first), 1)
    assert prefixes.nbytes == 4 * BLOCK_BYTES
    prefixes.save(ran([*first[: 2 * BLOCK], *sequence(1, BLOCK)]), 1)
    assert prefixes.nbytes == 5 * BLOCK_BYTES
    prefixes.save(ran(first[: 3 * BLOCK]), 1)
    assert prefixes.nbytes == 5 * BLOCK_BYTES


def test_least_recently_used_blocks_go_first_and_ends_before_beginnings() -> None:
    limit = 4  # MiB, eight blocks
    prefixes, (a, b, c) = Prefixes(SumDecoder(), limit), (sequence(seed, 3 * BLOCK) for seed in range(3))
    for tokens in (a, b):
        prefixes.save(ran(tokens), 1)
    prefixes.load(ran([1]), 1, [*a, 0, 0])
    prefixes.save(ran(c), 1)  # two blocks fit; the last one of `b`, which was used least recently, gives its memory
    assert [prefixes.count([*tokens, 0, 0]) // BLOCK for tokens in (a, b, c)] == [3, 2, 3]
    prefixes.save(ran(sequence(3, 12 * BLOCK)), 1)  # only its beginning fits
    assert [prefixes.count([*tokens, 0, 0]) for tokens in (a, b, c)] == [0, 0, 0]
    assert prefixes.count(sequence(3, 12 * BLOCK)) == 8 * BLOCK and prefixes.nbytes == limit << 20


def test_states_are_stored_whole_at_the_end_of_a_sequence() -> None:
    prefixes, tokens = Prefixes(SumDecoder(can_rewind=False)), sequence(0, 90)
    prefixes.save(ran(tokens, rewinds=False), 1)
    prefixes.save(ran(tokens[:40], rewinds=False), 1)
    assert prefixes.count([*tokens, 1, 1]) == 90 and prefixes.count([*tokens[:80], 1]) == 40
    assert prefixes.count(tokens[:40]) == 0 and prefixes.count([*tokens[:39], 99, 1]) == 0
    context = ran([5, 5], rewinds=False)
    assert prefixes.load(context, 1, [*tokens, 3, 4]) == 90
    assert context.append(1, [[3, 4]]).argmax(-1).tolist() == continue_sums([*tokens, 3, 4], 1)


def test_caches_of_decode_steps_are_not_stored_if_activations_are_rounded() -> None:
    tokens, decoder = sequence(0, 3 * BLOCK), SumDecoder()
    decoder.rounds = True
    prefixes = Prefixes(decoder)
    prefixes.save(ran(tokens), 1, 2 * BLOCK + 9)
    assert prefixes.count([*tokens, 1, 1]) == 2 * BLOCK
    states = SumDecoder(can_rewind=False)
    states.rounds = True
    prefixes = Prefixes(states)
    prefixes.save(ran(tokens, rewinds=False), 1)
    assert prefixes.nbytes == 0


def test_adapters_have_caches_of_their_own() -> None:
    tokens, prefixes = sequence(0, 2 * BLOCK), Prefixes(SumDecoder())
    prefixes.save(ran(tokens), 1)
    prefixes.decoder = SumDecoder()
    prefixes.decoder.adapter = "mine"
    assert prefixes.count([*tokens, 1, 1]) == 0
    prefixes.save(ran(tokens), 1)
    assert prefixes.count([*tokens, 1, 1]) == 2 * BLOCK and prefixes.nbytes == 4 * BLOCK_BYTES


def test_nothing_is_stored_where_it_would_not_be_exact_or_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, competing = sequence(0, 2 * BLOCK), SumDecoder()
    competing.compares = True
    for prefixes in (Prefixes(SumDecoder(), 0), Prefixes(SumDecoder(start=0)), Prefixes(competing)):
        prefixes.save(ran(tokens), 1)
        assert prefixes.nbytes == 0
    context, prefixes = ran(tokens), Prefixes(SumDecoder())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(context, "_run_tokens", interrupt)
    with pytest.raises(KeyboardInterrupt):
        context.append(1, [[1]])
    prefixes.save(context, 1)
    assert prefixes.nbytes == 0
    prefixes.save(ran(tokens), 1)
    prefixes.cache.limit = 0
    assert prefixes.count([*tokens, 1, 1]) == 0


def test_stored_prefixes_give_up_their_memory_when_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes, context = Prefixes(SumDecoder()), ran(sequence(0, 5 * BLOCK))
    prefixes.save(ran(sequence(1, BLOCK)), 1)
    read_row = context.read_row

    def refuse(row: int, start: int, end: int) -> list[Any]:
        if start:
            raise WeftError("out of memory")
        return read_row(row, start, end)

    monkeypatch.setattr(context, "read_row", refuse)
    prefixes.save(context, 1)
    assert prefixes.nbytes == 0 and prefixes.count(sequence(1, BLOCK + 2)) == 0


TARGETS = ("ort-cpu", "torch", "onnx")


@pytest.fixture(scope="module", params=each(5, [(target, kind) for kind in STACKS for target in TARGETS]), ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator:
    target, kind = request.param
    folder = tmp_path_factory.mktemp("stack") / "out"
    weft.compile(load_source(stack(kind)), folder, target=target)
    model = weft.load(folder, threads=1, trust=True)
    assert isinstance(model, Generator)
    return model


@pytest.mark.halved
@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "top_p": 0.95, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("compact", [True, False])
def test_answers_with_stored_prefixes_are_the_same(model: Generator, options: dict[str, Any], compact: bool) -> None:
    """In batches whose rows join, move and leave, on models with every kind of cache and state."""
    system, sampling = sequence(0, 2 * BLOCK + 5, VOCAB), Sampling(**options)

    def compute(prompts: list[list[int]]) -> list[list[int]]:
        return [model.generate([prompt], max_tokens=9, **options)[0].tokens for prompt in prompts]

    prefixes = PrefixCache()
    batch = RunningBatch(model.decoder, 2, compact=compact, prefixes=prefixes)
    prompts = [[*system, *sequence(seed, 3 + 5 * seed, VOCAB)] for seed in range(1, 5)]
    hits, starts = [], [0] * 4
    for _ in range(2):
        expected = compute(prompts)
        given = [model.answer(prompt, max_tokens=9, sampling=sampling) for prompt in prompts]
        run(batch, given)
        assert [answer.result.tokens for answer in given] == expected
        hits.append([answer.result.timings.cached_tokens for answer in given])
        if len(hits) == 1:
            starts = [len(prompt) + 8 for prompt in prompts]  # the last token of an answer never runs
            prompts = [[*p, *t, 5, 6] for p, t in zip(prompts, expected, strict=True)]
    assert hits[1] == (starts if not model.decoder.can_rewind else [n // BLOCK * BLOCK for n in starts])
    assert hits[0][2:] == ([0, 0] if not model.decoder.can_rewind else [2 * BLOCK] * 2)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 3}], ids=["greedy", "sampled"])
def test_conversations_share_prefixes(model: Generator, options: dict[str, Any]) -> None:
    model.prefixes.clear()
    prompt = sequence(7, 150, VOCAB)
    expected = model.generate([prompt], max_tokens=9, **options)[0].tokens
    for cached in (0, 0 if not model.decoder.can_rewind else 2 * BLOCK):
        (result,) = model.conversation().generate([prompt], max_tokens=9, **options)
        assert result.tokens == expected and result.timings.cached_tokens == cached
    longer = [*prompt, *expected, 3, 4]
    (result,) = model.conversation().generate([longer], max_tokens=9, **options)
    assert result.tokens == model.generate([longer], max_tokens=9, **options)[0].tokens
    assert result.timings.cached_tokens == (158 if not model.decoder.can_rewind else 2 * BLOCK)

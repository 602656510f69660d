"""Beam search against transformers: the same texts and scores, token by token, for decoders and encoder-decoders."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import weft
from weft.backends.runtime.core.beams import Beams, BeamSearch
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.core.sampler import TokenRules
from weft.ir.errors import WeftError

from ....sampling import each
from ...onnx.theirs import randomized, searched

VOCAB = 61
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None}
LLAMA = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "max_position_embeddings": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, Any] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **COMMON)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, **HEADS, **COMMON)),
}
PROMPTS = [[5, 9, 33, 2, 60, 7, 11], [1], [40, 41, 42, 43]]
HOWS: list[dict[str, Any]] = [
    {},
    {"early_stopping": True},
    {"early_stopping": "never"},
    {"length_penalty": 0.0},
    {"length_penalty": 3.0, "early_stopping": "never"},
    {"length_penalty": -1.0},
    {"length_penalty": 2.0, "early_stopping": True, "beams": 2},
]
STOPS: list[list[int]] = [[], [7], [7, 20, 33, 34, 35, 41]]


@pytest.fixture(scope="module", params=sorted(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return a model of transformers and the decoder compiled from it."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs: Any = randomized(MODELS[request.param]())
    theirs.save_pretrained(folder / "hf")
    weft.compile(folder / "hf", folder / "out")
    return theirs, weft.load(folder / "out", threads=1)


@pytest.mark.halved
@pytest.mark.parametrize(("how", "stop"), each(2, itertools.product(HOWS, STOPS)), ids=str)
def test_beams_and_scores_equal_transformers(pair: tuple[Any, Any], how: dict[str, Any], stop: list[int]) -> None:
    theirs, ours = pair
    model = Generator(ours.decoder, stop_ids=frozenset(stop))
    results = model.generate(PROMPTS, max_tokens=14, **{"beams": 4, "returned": 2, **how})
    wanted = [text for prompt in PROMPTS for text in searched(theirs, prompt, stop, 14, **how)]
    assert [result.tokens for result in results] == [tokens for tokens, _ in wanted]
    np.testing.assert_allclose([result.score for result in results], [score for _, score in wanted], rtol=1e-4)
    assert [r.finish == "stop" for r in results] == [bool(stop) and r.tokens[-1] in stop for r in results]
    assert [r.prompt for r in results] == [prompt for prompt in PROMPTS for _ in range(2)]


def test_beam_search_scores_at_least_greedy(pair: tuple[Any, Any]) -> None:
    """Were the caches not reordered with their texts, the score would not be that of the text."""
    _, ours = pair
    model = Generator(ours.decoder)
    for prompt in PROMPTS:
        (best,) = model.generate(prompt, max_tokens=12, beams=5, chunk=3)
        (greedy,) = model.generate(prompt, max_tokens=12)
        scores = [log_probability(model, prompt, result.tokens) / 12 for result in (best, greedy)]
        assert scores[0] >= scores[1]
        np.testing.assert_allclose(best.score, scores[0], rtol=1e-4)


def log_probability(model: Generator, prompt: list[int], tokens: list[int]) -> float:
    ids = [*prompt, *tokens]
    logits = model.logits(ids[:-1], chunk=1).astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return float(sum(logs[at - 1, ids[at]] for at in range(len(prompt), len(ids))))


def test_one_beam_is_the_greedy_text(pair: tuple[Any, Any]) -> None:
    _, ours = pair
    assert ours.generate(PROMPTS, max_tokens=9, beams=1) == ours.generate(PROMPTS, max_tokens=9)


def test_timings_of_a_search(pair: tuple[Any, Any]) -> None:
    _, ours = pair
    timings = Generator(ours.decoder).generate(PROMPTS, max_tokens=5, beams=3)[0].timings
    assert timings.prompt_tokens == sum(map(len, PROMPTS)) and timings.decoded_tokens == 3 * 3 * 4
    assert timings.cache_bytes == ours.decoder.cache_bytes(9, 20)


def test_forced_tokens_begin_and_end_a_beam() -> None:
    one = BeamSearch(Beams(beams=2), 3, frozenset([9]), TokenRules(begin=((4,),), last=9))
    rng = np.random.default_rng(0)
    parents, tokens = one.advance(rng.standard_normal((2, 10)).astype(np.float32))
    assert tokens == [4, 4] and parents == [0, 0]
    one.advance(rng.standard_normal((2, 10)).astype(np.float32))
    one.advance(rng.standard_normal((2, 10)).astype(np.float32))
    assert not one.open and [(t.tokens[0], t.tokens[-1], len(t.tokens)) for t in one.best] == [(4, 9, 3)] * 2


@pytest.mark.parametrize(("early_stopping", "penalty", "goes_on"), [(False, 1, 0), ("never", 1, 1), ("never", -1, 0)])
def test_early_stopping_decides_when_a_search_ends(early_stopping: Any, penalty: float, goes_on: int) -> None:
    """ln 0.35 is below ln 0.45 of what has ended, but a tenth of it is not."""
    one = BeamSearch(Beams(1, penalty, early_stopping), 10, frozenset([0]), TokenRules())
    one.advance(np.log(np.float32([[0.45, 0.35, 0.2]])))
    assert one.open == bool(goes_on) and [text.tokens for text in one.best] == [(0,)]


def test_beams_may_outnumber_the_vocabulary() -> None:
    one = BeamSearch(Beams(beams=5, returned=5), 2, frozenset(), TokenRules())
    logits = np.log(np.float32([[0.7, 0.3]] * 5))
    assert one.advance(logits) == ([0] * 5, [0, 1, 0, 0, 0])
    one.advance(logits)
    assert [text.tokens for text in one.best] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    np.testing.assert_allclose([t.score for t in one.best], np.log([0.49, 0.21, 0.21, 0.09]) / 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beams": 0}, "beams is 0"),
        ({"beams": 2.0}, "beams is 2.0"),
        ({"beams": 2, "returned": 3}, "returned is 3, but there are only 2 beams"),
        ({"returned": 2}, "returned is 2, but there are only 1 beams"),
        ({"beams": 2, "length_penalty": float("nan")}, "length_penalty is nan"),
        ({"beams": 2, "early_stopping": "soon"}, "early_stopping is 'soon'"),
        ({"beams": 2, "early_stopping": 1}, "early_stopping is 1"),
        ({"beams": 2, "temperature": 0.5}, "takes no stop strings or sampling"),
        ({"beams": 2, "stop": "x"}, "takes no stop strings or sampling"),
        ({"beams": 2, "max_tokens": 0}, "max_tokens is 0"),
        ({"length_penalty": 2.0}, "need a beam search: set beams above 1"),
        ({"early_stopping": True}, "need a beam search: set beams above 1"),
        (
            {"seed": 1},
            "seed is 1, but nothing is sampled at temperature 0: give a temperature above 0, or leave out seed",
        ),
        ({"top_p": 0.5, "temperature": 0}, "top_p is 0.5, but nothing is sampled at temperature 0"),
    ],
)
def test_bad_searches_are_refused(pair: tuple[Any, Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(WeftError, match=words):
        pair[1].generate([1], **options)


def test_nan_logits_raise_in_a_beam_search() -> None:
    logits = np.full((2, 5), np.nan, np.float32)
    with pytest.raises(WeftError, match="largest logit"):
        BeamSearch(Beams(beams=2), 3, frozenset(), TokenRules()).advance(logits)

"""Folders of PyTorch in weft's own runtime: caches and states of every kind, held against the meaning in float64."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft.backends.alignment.traces import compute_error
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.torch import cuda_graphs as torch_steps
from weft.backends.runtime.torch.open_torch import import_from
from weft.backends.runtime.torch.torch_decoder import TorchDecoder
from weft.frontends import load_source
from weft.frontends.app.api.verify.error_bounds import compute_tolerance
from weft.ir import Graph

from ....sampling import each
from ..stacks import CAREFUL, PROMPTS, VOCAB, stack, tokens
from .generated_decoder import assert_greedy, logits_of, opened
from .replays import replayed

KINDS = ["hybrid", "latent", "rolling, first keys"]  # of `STACKS`; the others are made of the same caches
TOLERANCE = compute_tolerance("f32", layers=4, reduction=64)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def graph(kind: str) -> Graph:
    return load_source(stack(kind), seed=5).graph


@pytest.fixture(scope="module")
def folder(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("torch") / "out"
    weft.compile(graph, out, target="torch")
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> Generator:
    return opened(folder)


@pytest.mark.parametrize("chunk", [3, 512])
def test_batches_of_unequal_prompts(graph: Graph, model: Generator, chunk: int) -> None:
    results = model.generate(PROMPTS, max_tokens=14, chunk=chunk)
    assert len({token for row in tokens(results) for token in row}) > 10
    assert_greedy(graph, results, 14)


def test_logits_are_those_of_a_full_pass(graph: Graph, model: Generator) -> None:
    ids = np.random.default_rng(3).integers(0, VOCAB, 45).tolist()
    wanted = logits_of(graph, ids)
    for chunk in (512, 7, 1):
        got = model.logits(ids, chunk)
        assert got.shape == wanted.shape and compute_error(got, wanted) <= TOLERANCE, chunk


def test_ended_rows_do_not_change_other_rows(model: Generator) -> None:
    wanted = tokens(model.generate(PROMPTS, max_tokens=12))
    stopping = Generator(model.decoder, stop_ids=frozenset([wanted[0][3], wanted[2][1]]))
    for row, result in zip(wanted, stopping.generate(PROMPTS, max_tokens=12), strict=True):
        ends = [at + 1 for at, token in enumerate(row) if token in stopping.stop_ids]
        assert result.tokens == row[: min(ends, default=12)]


def test_beam_scores_are_log_probabilities(graph: Graph, model: Generator) -> None:
    """The score of a text is its log-probability, which it is only if everything moved along with it."""
    for result in model.generate(PROMPTS[:3], max_tokens=8, beams=3, returned=3):
        logits = logits_of(graph, [*result.prompt, *result.tokens[:-1]])[len(result.prompt) - 1 :]
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        score = sum(row[token] for row, token in zip(logs, result.tokens, strict=True))
        np.testing.assert_allclose(result.score, score / 8, rtol=1e-4)


def test_conversation_prefills_only_new_tokens(graph: Graph, model: Generator) -> None:
    talk, prompt, held = model.conversation(), list(range(3, 30)), 0
    for turn in range(4):  # 27, then 41 more tokens a turn: the caches grow past their first 256 slots
        (result,) = talk.generate(prompt, max_tokens=35, chunk=16)
        assert result.timings.prompt_tokens == len(prompt) - held
        if turn == 3:
            assert_greedy(graph, [result], 35)
        held = len(prompt) + 34  # the last token was never fed back
        prompt = [*prompt, *result.tokens, *range(40, 46), *range(30)]


def test_changed_prefix_is_prefilled_again(kind: str, graph: Graph, model: Generator) -> None:
    talk = model.conversation()
    talk.generate(PROMPTS[4], max_tokens=3)
    changed = [*PROMPTS[4][:12], 7, 7, 7]
    (result,) = talk.generate(changed, max_tokens=8)
    assert_greedy(graph, [result], 8)
    assert result.timings.prompt_tokens == (15 if kind in CAREFUL else 3)


def test_interrupted_run_invalidates_the_cache(graph: Graph, model: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = model.conversation()
    talk.generate(PROMPTS[4], max_tokens=3)

    def interrupted(*given: Any, **named: Any) -> None:
        call(*given, **named)
        raise KeyboardInterrupt

    call = TorchDecoder.run_model
    with monkeypatch.context() as patch:
        patch.setattr(TorchDecoder, "run_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            talk.generate([*PROMPTS[4], 1, 2, 3, 4], max_tokens=3)
    (result,) = talk.generate([*PROMPTS[4], 1, 2, 3, 4, 5], max_tokens=6)
    assert_greedy(graph, [result], 6)
    assert result.timings.prompt_tokens == len(PROMPTS[4]) + 5


def test_caches_are_as_large_as_the_manifest_says(kind: str, model: Generator, folder: Path) -> None:
    manifest = json.loads((folder / "weft.json").read_text())
    slots = [256 if cache["capacity"] is None else cache["capacity"] for cache in manifest["cache"]]
    parts = [1 if cache["latent"] else 2 for cache in manifest["cache"]]
    numbers = sum(
        n * part * cache["kv_heads"] * cache["head_dim"]
        for n, part, cache in zip(slots, parts, manifest["cache"], strict=True)
    )
    numbers += sum(int(np.prod(state["shape"])) for state in manifest["states"])
    results = model.generate(PROMPTS, max_tokens=14)
    assert results[0].timings.cache_bytes == len(PROMPTS) * numbers * 4
    decoder: Any = model.decoder
    assert decoder.can_rewind == (kind not in CAREFUL)
    assert decoder.padded == (kind != "hybrid")


def test_decode_step_file_gives_the_same_tokens(folder: Path, graph: Graph) -> None:
    """Without Triton its kernels compute with PyTorch."""
    assert json.loads((folder / "weft.json").read_text())["kernels"]
    stepping = opened(folder)
    with import_from(folder):
        decoder: Any = stepping.decoder
        decoder.step = importlib.import_module("decode").Step(decoder.model)
    assert_greedy(graph, stepping.generate(PROMPTS, max_tokens=14, chunk=4), 14)


@pytest.mark.parametrize(("draws", "kernels"), each(3, itertools.product((False, True), repeat=2)))
def test_steps_are_captured_once_or_for_each_bound(
    folder: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch, draws: bool, kernels: bool
) -> None:
    """Steps of kernels read on the device how long texts are; those of the module are cut to bounds."""
    captured: list[Any] = []
    monkeypatch.setattr(torch_steps, "MIN_KEYS", 8)
    monkeypatch.setattr(torch_steps, "capture_graph", lambda *given: captured.append(given) or replayed(*given))
    model = opened(folder, draws=draws)
    decoder: Any = model.decoder
    if not kernels:
        decoder.step = decoder._run_step
    context: Any
    with model.decoder.context(len(PROMPTS), 40) as context:
        context.steps._cuda = True
    results = model.generate(PROMPTS, max_tokens=20)
    assert_greedy(graph, results, 20)  # 21 + 19 tokens of the longest row: bounds of 32 and 64 keys
    times = 1 if kernels else 2
    assert len(captured) == times
    assert tokens(model.generate(PROMPTS, max_tokens=20)) == tokens(results)
    assert len(captured) == times


def test_next_step_is_launched_before_tokens_are_read(
    folder: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a row has ended, or what is kept are states."""
    happened: list[str] = []
    for name in ("launch_step", "pop_tokens"):
        whole = getattr(torch_steps.CapturedSteps, name)
        monkeypatch.setattr(
            torch_steps.CapturedSteps,
            name,
            lambda *given, whole=whole, name=name: happened.append(name) or whole(*given),
        )
    model = opened(folder, draws=True)
    results = model.generate(PROMPTS[:1], max_tokens=6)
    assert_greedy(graph, results, 6)
    steps = 1 + happened.count("pop_tokens")  # the prompt draws the first
    assert steps == 6
    drawn = ["launch_step", "pop_tokens"] * 5
    assert happened == (["launch_step", *drawn] if model.decoder.can_rewind else drawn)


def test_synchronizing_steps_run_without_a_graph(folder: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(*_: Any) -> None:
        raise torch_steps.SynchronizationError("called a synchronizing operation")

    monkeypatch.setattr(torch_steps, "capture_graph", waits)
    model = opened(folder, draws=True)
    context: Any
    with model.decoder.context(len(PROMPTS), 40) as context:
        context.steps._cuda = True
    with pytest.warns(
        UserWarning, match="steps are launched kernel by kernel, without a CUDA graph: called a synchronizing"
    ) as said:
        results = model.generate(PROMPTS, max_tokens=20)
    assert_greedy(graph, results, 20)
    assert len(said) == 1  # tried once for all steps that see few keys


def test_wrong_vocabulary_in_the_manifest_is_reported(model: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.decoder, "vocab", model.decoder.vocab + 1)
    monkeypatch.setattr(model.decoder, "_spare", None)
    with pytest.raises(weft.WeftError, match=r"logits are \d+ wide, but the manifest records a vocabulary of"):
        model.generate([PROMPTS[0]], max_tokens=1)

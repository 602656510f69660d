"""Decode steps and prompts captured as CUDA graphs: replayed without CUDA, and compared with float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.core.sampler import Sampler, Sampling
from weft.backends.runtime.torch import cuda_graphs as torch_steps
from weft.backends.runtime.torch.cuda_graphs import DeviceSampler
from weft.backends.runtime.torch.torch_decoder import TorchContext
from weft.frontends import load_source
from weft.ir import Graph

from ....passes.zoo_variants import attends
from ..stacks import tokens
from .generated_decoder import assert_greedy, opened
from .replays import replayed

PROMPTS = [[1, 4, 2, 7, 3], [5, 6], [2, 8, 8, 1, 1, 4, 3]]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return load_source(attends(), seed=5).graph


@pytest.fixture(scope="module")
def folder(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("torch") / "out"
    weft.compile(graph, out, target="torch", max_length=64)
    return out


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record where prompts that a step runs begin, and their numbers of tokens."""
    found: list[tuple[int, int]] = []
    real = TorchContext._read_prompt

    def noted(context: TorchContext, first: int, ids: Any, start: int, last: Any) -> Any:
        found.append((start, ids.shape[1]))
        return real(context, first, ids, start, last)

    monkeypatch.setattr(TorchContext, "_read_prompt", noted)
    return found


@pytest.mark.parametrize(("chunk", "wanted"), [(512, [(0, 7)]), (3, [(0, 3), (6, 1)])])
def test_prompts_of_a_batch(
    folder: Path, graph: Graph, pieces: list[tuple[int, int]], chunk: int, wanted: list[tuple[int, int]]
) -> None:
    """In chunks of the longest; rows that do not go on from the same position are read by the module."""
    assert_greedy(graph, opened(folder).generate(PROMPTS, max_tokens=14, chunk=chunk), 14)
    assert set(wanted) <= set(pieces)


def test_drafts_are_verified_in_one_call(folder: Path, pieces: list[tuple[int, int]]) -> None:
    model, text = opened(folder), [3, 1, 2] * 6
    (plain,) = model.generate([text], max_tokens=20)
    pieces.clear()
    (ahead,) = model.generate([text], max_tokens=20, prompt_lookup_num_tokens=4)
    assert ahead.tokens == plain.tokens
    assert any(start >= len(text) and count > 1 for start, count in pieces)


def test_prompts_that_recur_are_captured(folder: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """By lengths that are powers of two, and from the second on; what stands behind a prompt is never seen."""
    captured: list[Any] = []
    monkeypatch.setattr(torch_steps, "PROMPT_LENGTHS", (4, 8))
    monkeypatch.setattr(torch_steps, "capture_graph", lambda *given: captured.append(given) or replayed(*given))
    model: Generator = opened(folder)
    context: Any
    with model.decoder.context(len(PROMPTS), 40) as context:
        context.steps._cuda = True
    first = model.generate(PROMPTS, max_tokens=14)
    assert_greedy(graph, first, 14)
    assert len(captured) == 1  # steps
    for _ in range(2):
        assert tokens(model.generate(PROMPTS, max_tokens=14)) == tokens(first)
        assert len(captured) == 2
    others = [[7, 7, 7], [1, 2, 3, 4], [6]]
    for _ in range(2):
        assert_greedy(graph, model.generate(others, max_tokens=14), 14)
    assert len(captured) == 3
    longer = [[*prompt, *[5] * 6] for prompt in PROMPTS]
    for _ in range(2):
        assert_greedy(graph, model.generate(longer, max_tokens=14), 14)
    assert len(captured) == 3


class CrossCache:
    """Imitate a cache of cross-attention, known by the name of its class."""

    def __init__(self, *kept: torch.Tensor) -> None:
        self.kept = kept


class Held(list[Any]):
    capacity, length = 64, 0


def test_longer_source_at_the_same_address_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Any] = []
    monkeypatch.setattr(torch_steps, "capture_graph", lambda *given: captured.append(given) or replayed(*given))
    source = torch.ones(1, 1, 12)
    layer = CrossCache(source[..., :4])
    steps = torch_steps.CapturedSteps(
        lambda *_: layer.kept[0].sum(-1)[..., None], Held([layer]), 1, torch.device("cpu")
    )
    steps._cuda = True
    for length, times in ((4, 1), (4, 1), (12, 2)):
        layer.kept = (source[..., :length],)
        assert steps.run_step(3).item() == length
        assert len(captured) == times


BATCH, VOCAB = 2, 30


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({}, True),
        ({"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.5}, False),
        ({"logit_bias": {3: 1.0}}, False),
    ],
)
def test_penalties_and_biases_need_the_host(options: dict[str, Any], possible: bool) -> None:
    assert Sampling(**options).has_adjustments != possible


@pytest.mark.parametrize("options", [{}, {"temperature": 1.3}, {"temperature": 0.9, "top_k": 7, "top_p": 0.8}])
def test_tokens_are_those_of_the_host(options: dict[str, Any], rng: np.random.Generator) -> None:
    sampling = Sampling(**options, seed=4) if options else Sampling()
    device, host = ([Sampler(sampling, [], row) for row in range(BATCH)] for _ in range(2))
    draw = DeviceSampler(sampling, BATCH, 9, torch.device("cpu"))
    draw.refill(device)
    ids, positions, active = torch.zeros(BATCH, 1).long(), torch.full((BATCH, 1), 3), torch.ones(BATCH, 1).bool()
    for step in range(4):
        logits = (3 * rng.standard_normal((BATCH, VOCAB))).astype(np.float32)
        found = draw(torch.from_numpy(logits), (ids, positions, active)).tolist()
        assert found == [sampler(row) for sampler, row in zip(host, logits, strict=True)]
        assert ids[:, 0].tolist() == found and positions[:, 0].tolist() == [4 + step] * BATCH


def test_idle_rows_keep_their_inputs_and_refills_start_anew() -> None:
    sampling = Sampling(temperature=1.0, seed=2)
    samplers = [Sampler(sampling, [], row) for row in range(BATCH)]
    draw = DeviceSampler(sampling, BATCH, 4, torch.device("cpu"))
    draw.refill(samplers)
    ids, positions = torch.full((BATCH, 1), 7), torch.zeros(BATCH, 1).long()
    draw(torch.zeros(BATCH, VOCAB), (ids, positions, torch.tensor([[True], [False]])))
    assert ids[1].item() == 7 and positions[:, 0].tolist() == [1, 0]
    (spent,) = draw.changed_tensors
    assert spent[0].item() == 1
    draw.refill(samplers)
    assert not spent.any()

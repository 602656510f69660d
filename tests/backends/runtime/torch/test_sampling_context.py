"""Tokens drawn on the device, held against those that the samplers of the host draw by the same random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft.backends.runtime.core.generation import Generator

from ....sampling import each
from ..stacks import PROMPTS, stack, tokens
from .generated_decoder import opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("torch") / "out"
    weft.compile(stack("local-global"), out, target="torch", seed=5)
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> Generator:
    return opened(folder)


SAMPLED = [
    {},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.3, "top_k": 9, "seed": 4},
    {"temperature": 1.0, "top_p": 0.8, "seed": 5},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "seed": 6},
    {"temperature": 1e-45, "seed": 7},
    {"temperature": 1e-30, "top_p": 0.9, "seed": 8},
]


@pytest.mark.parametrize("options", each(2, SAMPLED))
def test_device_tokens_equal_host_tokens(folder: Path, model: Generator, options: Any) -> None:
    drawing = opened(folder, draws=True)
    for generator in (model, drawing):
        generator.stop_ids = frozenset([7])  # rows end at different times
    results = [tokens(m.generate(PROMPTS, max_tokens=12, **options)) for m in (model, drawing, drawing)]
    model.stop_ids = frozenset()
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", ["latent", "rolling"])
def test_device_sampling_stops_at_the_maximum_length(name: str, tmp_path: Path) -> None:
    """No step begins behind the last slot; what a step left behind is not taken for text by the next turn."""
    weft.compile(stack(name), tmp_path / "out", target="torch", seed=5, max_length=24)
    drawing, plain = (opened(tmp_path / "out", draws=draws) for draws in (True, False))
    found = [tokens(m.generate(PROMPTS, max_tokens=None)) for m in (drawing, plain)]
    assert found[0] == found[1] and len(found[0][0]) == 25 - len(PROMPTS[0])
    for model in (drawing, plain):
        talk = model.conversation()
        (first,) = talk.generate(PROMPTS[0], max_tokens=5)
        (second,) = talk.generate([*PROMPTS[0], *first.tokens, 9, 9], max_tokens=5)
        found.append([first.tokens, second.tokens, [second.timings.prompt_tokens]])
    assert found[2] == found[3]


def test_penalties_are_sampled_on_the_host(folder: Path, model: Generator) -> None:
    options: Any = {"temperature": 1.0, "repetition_penalty": 1.4, "seed": 2}
    drawing = opened(folder, draws=True)
    assert tokens(drawing.generate(PROMPTS, **options, max_tokens=9)) == tokens(
        model.generate(PROMPTS, **options, max_tokens=9)
    )


def test_nan_logits_are_reported(folder: Path) -> None:
    drawing = opened(folder, draws=True)
    decoder: Any = drawing.decoder
    step = decoder.step
    decoder.step = lambda ids, positions, cache: step(ids, positions, cache) * torch.nan
    with pytest.raises(weft.WeftError, match="computed nan as its largest logit"):
        drawing.generate(PROMPTS, max_tokens=3)

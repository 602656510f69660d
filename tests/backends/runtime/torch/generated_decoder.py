"""Generated PyTorch decoders from folders, and the float64 reference for their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import weft
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.torch.torch_decoder import TorchDecoder
from weft.ir import Graph, interpret


def opened(folder: Path, **changes: Any) -> Generator:
    model = weft.load(folder, device="cpu", trust=True)
    assert isinstance(model, Generator) and isinstance(model.decoder, TorchDecoder)
    for name, value in changes.items():
        setattr(model.decoder, name, value)
    return model


def logits_of(graph: Graph, ids: list[int]) -> np.ndarray:
    """Compute the logits [tokens, vocab] of one full pass in float64."""
    inputs = {"input_ids": np.array([ids]), "position_ids": np.arange(len(ids))[None]}
    found: np.ndarray = interpret(graph, {name: inputs[name] for name in graph.inputs})["logits"][0]
    return found


def assert_greedy(graph: Graph, results: list[Any], count: int) -> None:
    """Check that each result is the greedy continuation of its prompt by `count` tokens."""
    for result in results:
        assert len(result.tokens) == count
        wanted = logits_of(graph, [*result.prompt, *result.tokens])[len(result.prompt) - 1 : -1].argmax(-1)
        assert result.tokens == wanted.tolist()

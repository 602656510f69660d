"""Tiny models of transformers, and what hooks see in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.frontends import load_source
from weft.ir import Graph

from ....e2e.families import LENGTH, ROWS, VOCAB

IDS = np.random.default_rng(1).integers(3, VOCAB, (1, LENGTH))
Hook = Callable[[torch.Tensor], torch.Tensor]


def load(name: str, folder: Path) -> tuple[Any, Graph]:
    """The model of a row of the table test, in f32, and its graph."""
    model = ROWS[name].save(folder)
    return model, load_source(folder).graph


def call(model: Any, **options: Any) -> Any:
    """The results of the model for `IDS`."""
    with torch.inference_mode():
        return model(torch.from_numpy(IDS), **options)


def feeds(graph: Graph, **more: np.ndarray) -> dict[str, np.ndarray]:
    """The inputs of a graph for `IDS`; scales are 1 and means 0 unless `more` has them."""
    known = {"input_ids": IDS, "position_ids": np.arange(LENGTH)[None], "attention_mask": np.ones_like(IDS), **more}
    known |= {name.replace("/", "."): array for name, array in more.items()}
    made = {}
    for name, value in graph.inputs.items():
        made[name] = known[name] if name in known else np.full(value.shape, float(name.startswith("scale.")))
    return made


@contextmanager
def changed(changes: Mapping[torch.nn.Module, Hook], *, inputs: bool) -> Iterator[None]:
    """A context in which hooks change what modules read (`inputs`) or return."""

    def edit_input(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (changes[module](args[0]), *args[1:])

    def edit_output(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (changes[module](output[0]), *output[1:])
        return changes[module](output)

    handles = [
        module.register_forward_pre_hook(edit_input) if inputs else module.register_forward_hook(edit_output)
        for module in changes
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

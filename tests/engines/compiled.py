"""Folders as users have them: written by the target transformers, loaded by `from_pretrained` with trust."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

import weft
from weft.frontends.app.api.source.sources import load_source
from weft.ir import interpret

from ..backends.torch.transformers.folders import graph_of


def compiled(name: str, out: Path) -> Path:
    """The folder `out` of a graph of the zoo."""
    weft.compile(graph_of(name), out, target="transformers", class_name="Tiny")
    return out


def loaded(folder: Path, auto: str = "AutoModelForCausalLM") -> Any:
    return getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()


def reference(source: Path, ids: Tensor, adapters: tuple[Path, ...] = ()) -> NDArray[Any]:
    """The logits, or the hidden states, that the float64 reference of the graph of `source` computes."""
    graph = load_source(source, adapters=adapters).graph
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(ids.shape[1])[None]}
    given["token_type_ids"] = torch.zeros_like(ids)
    outputs = interpret(graph, {name: given[name].expand(ids.shape).numpy() for name in graph.inputs})
    return next(iter(outputs.values()))


def error(got: Tensor | NDArray[Any], want: NDArray[Any] | Tensor) -> float:
    """The largest difference over the largest number."""
    a, b = (np.asarray(x.detach() if isinstance(x, Tensor) else x, np.float64) for x in (got, want))
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / np.abs(b).max())


def texts(rows: int, seq: int, vocab: int, seed: int = 0) -> Tensor:
    """Rows that a model can learn: each counts up from a random token."""
    start = torch.randint(1, vocab, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return 1 + (start + torch.arange(seq)) % (vocab - 1)

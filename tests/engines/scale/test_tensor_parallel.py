"""Tensor parallelism of transformers over folders, in processes of gloo: equal to the float64 reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ...backends.transformers.folders import error, wanted
from .jobs import logits
from .models import MODELS, folder_named, graph_named, tokens
from .processes import in_processes

BOUND = 1e-4


@pytest.mark.parametrize(("count", "names"), [(2, [*MODELS]), (4, ["qwen3", "mixtral"])])
def test_processes_make_what_the_reference_makes(count: int, names: list[str], tmp_path: Path) -> None:
    """Logits, and greedy tokens with a cache; linear maps and experts are divided, and no process holds them all."""
    ids, built = tokens(), [folder_named(name, tmp_path) for name in names]
    divided = in_processes(count, logits, [folder for folder, _ in built], ids, {"tp_size": count})
    for i, name in enumerate(names):
        want = reference(name, ids)
        for process in divided:
            assert error(torch.from_numpy(process[i]["logits"]), want) <= BOUND
        followed = divided[0][i]["tokens"]
        assert all(np.array_equal(process[i]["tokens"], followed) for process in divided)
        assert np.array_equal(followed[:, ids.shape[1] :], greedy(name, followed, ids.shape[1]))
        assert 1 / count <= divided[0][i]["weights"] / built[i][1].weight_bytes < (1 + 1 / count) / 2


def reference(name: str, ids: Any) -> Any:
    graph = graph_named(name)
    positions = {"position_ids": np.broadcast_to(np.arange(ids.shape[1]), ids.shape)}
    return wanted(graph, {"input_ids": ids, **{k: v for k, v in positions.items() if k in graph.inputs}})["logits"]


def greedy(name: str, texts: Any, start: int) -> Any:
    """The best tokens by the reference from place `start` on, given those before each."""
    return reference(name, texts)[:, start - 1 : -1].argmax(-1)

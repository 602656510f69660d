"""Heads over hidden states: what is pooled, transformed and scored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import HeadTransform, LayerNorm, TaskHead, trace
from weft.ir import TensorType
from weft.ir.types import dtypes

from .formulas.elementary import ACTIVATIONS, Array, layer_norm, linear
from .harness import RUNNERS, X, close, randomize, run

IDS, MASK = np.array([[5, 1, 5, 2, 0], [3, 5, 4, 4, 4]]), np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
SEQUENCES = "text-classification"
POOLED: dict[str, tuple[dict[str, Any], Any]] = {  # of one row of hidden states x [5, 16] and its mask
    "first": ({}, lambda x, mask: x[0]),
    "last": ({}, lambda x, mask: x[mask.sum() - 1]),
    "mean": ({}, lambda x, mask: x[mask == 1].mean(0)),
    "token": ({"token": 5}, lambda x, mask: x[2] if mask.sum() == 4 else x[1]),  # the last of id 5
}


def scores(head: TaskHead, runner: str) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """Return hidden states, the outputs of `head` for them, and its weights."""
    tokens = TensorType(dtypes.i64, X.shape[:2])
    graph = trace(lambda x, ids, mask: head(x, ids, mask), {"x": X, "ids": tokens, "mask": tokens})
    rng = np.random.default_rng(0)
    w, x = randomize(graph, rng), rng.standard_normal((2, 5, 16)).astype(np.float32).astype(np.float64)
    own = {name.removeprefix("task_head."): array for name, array in w.items()}
    return x, run(graph, {"x": x, "ids": IDS, "mask": MASK}, runner), own


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("pool", POOLED)
def test_pooled_scores(pool: str, runner: str) -> None:
    options, pooled = POOLED[pool]
    x, found, w = scores(TaskHead(SEQUENCES, 3, pool, **options), runner)
    want = linear(np.stack([pooled(x[b], MASK[b]) for b in range(2)]), w, "out", True)
    close(found["logits"], want, runner == "interpreter")


@pytest.mark.parametrize("runner", RUNNERS)
def test_late_pooling_averages_scores(runner: str) -> None:
    x, found, w = scores(TaskHead(SEQUENCES, 3, "late", bias=False), runner)
    want = np.stack([linear(x[b, MASK[b] == 1], w, "out").mean(0) for b in range(2)])
    close(found["logits"], want, runner == "interpreter")


@pytest.mark.parametrize("runner", RUNNERS)
def test_transform_before_token_scores(runner: str) -> None:
    transform = HeadTransform(LayerNorm(1e-3), "gelu", bias=True, width=6)
    x, found, w = scores(TaskHead("token-classification", ("a", "b"), transform=transform), runner)
    hidden = ACTIVATIONS["gelu"](linear(x, w, "transform.dense", True))
    hidden = layer_norm(hidden, w["transform.norm.weight"], w["transform.norm.bias"], 1e-3)
    close(found["logits"], linear(hidden, w, "out", True), runner == "interpreter")


@pytest.mark.parametrize("runner", RUNNERS)
def test_question_answering_scores_start_and_end(runner: str) -> None:
    x, found, w = scores(TaskHead("question-answering"), runner)
    want = linear(x, w, "out", True)
    assert list(found) == ["start_logits", "end_logits"]
    for i, got in enumerate(found.values()):
        close(got, want[..., i], runner == "interpreter")

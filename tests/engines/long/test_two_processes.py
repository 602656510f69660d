"""Folders divided by transformers in two and four processes of gloo: equal to the float64 reference, and each process
holds and sends the bytes that `weft inspect --parallel` counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.backends.torch.transformers.scale.shards import Split

from ..scale.checks import pipeline_and_check, run_and_check, train_and_check
from ..scale.models import MODELS

RUNS = [
    (Split(tp=2), [*MODELS]),
    (Split(tp=4), ["qwen3", "mixtral"]),
    (Split(pp=2), ["tied", "llama", "mixtral"]),
    (Split(tp=2, ep=2), ["mixtral", "deepseek"]),
    (Split(ep=2), ["sharing"]),
]


@pytest.mark.parametrize(("split", "names"), RUNS, ids=[f"{s.tp}-{s.ep}-{s.pp}" for s, _ in RUNS])
def test_processes_agree_with_the_reference_and_with_inspect(split: Split, names: list[str], tmp_path: Path) -> None:
    run_and_check(split, names, tmp_path)


@pytest.mark.parametrize(
    ("divided", "name"),
    [
        ({"fsdp_size": 2}, "tied"),
        ({"tp_size": 2}, "qwen3"),
        ({"fsdp_size": 2, "ep_size": 2}, "mixtral"),
        ({"tp_size": 2, "ep_size": 2}, "sharing"),
    ],
    ids=str,
)
def test_two_processes_train_as_one(divided: dict[str, int], name: str, tmp_path: Path) -> None:
    """By FSDP2, whose processes have rows of their own; by tensor parallelism; with experts that tokens are sent to."""
    train_and_check(2, divided, [name], tmp_path)


@pytest.mark.parametrize(("stages", "name"), [(2, "tied"), (3, "qwen3")])
def test_stages_of_the_plan_train_as_one_process(stages: int, name: str, tmp_path: Path) -> None:
    """Microbatches go through processes that keep what base_model_pp_plan gives their stage, and gradients back."""
    pipeline_and_check(stages, 2, name, tmp_path)

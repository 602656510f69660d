"""All models of the tests in four processes, as the two of tests/engines/scale are compared; `make test-engines`."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.backends.torch.transformers.scale.shards import Split

from ..scale.checks import pipeline_and_check, run_and_check, train_and_check
from ..scale.models import EXPERTS, MODELS, STAGED

SPLITS = [
    (Split(tp=4), [*MODELS]),
    (Split(pp=4), STAGED),
    (Split(pp=3), STAGED),
    (Split(tp=4, ep=4), EXPERTS),
    (Split(ep=4), EXPERTS),
    (Split(tp=2, ep=4), EXPERTS),
]
TRAINED = [
    ({"fsdp_size": 4}, [*MODELS]),
    ({"tp_size": 4}, [*MODELS]),
    ({"tp_size": 2, "fsdp_size": 2}, [*MODELS]),
    ({"fsdp_size": 4, "ep_size": 4}, EXPERTS),
    ({"tp_size": 2, "fsdp_size": 2, "ep_size": 4}, EXPERTS),
]


@pytest.mark.parametrize(("split", "name"), [(s, n) for s, names in SPLITS for n in names], ids=str)
def test_processes_agree_with_the_reference_and_with_inspect(split: Split, name: str, tmp_path: Path) -> None:
    run_and_check(split, [name], tmp_path)


@pytest.mark.parametrize(("divided", "name"), [(d, n) for d, names in TRAINED for n in names], ids=str)
def test_four_processes_train_as_one(divided: dict[str, int], name: str, tmp_path: Path) -> None:
    train_and_check(4, divided, [name], tmp_path)


@pytest.mark.parametrize("name", STAGED)
def test_four_stages_train_as_one_process(name: str, tmp_path: Path) -> None:
    pipeline_and_check(4, 4, name, tmp_path)

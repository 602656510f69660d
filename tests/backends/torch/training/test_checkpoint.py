"""Checkpoints continue bit by bit, and are whole or refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch

from weft.backends.torch.training.checkpoint import gather_weights, load_checkpoint, save_checkpoint
from weft.backends.torch.training.objectives import NextToken
from weft.backends.torch.training.trainer import Plan, Trainer, open_accelerator
from weft.ir.errors import WeftError

from .test_trainer import DATA, build

FACTS = {"phase": 0, "elapsed": [], "best": 1.5}


def open_trainer(steps: int = 6) -> Trainer:
    return Trainer(open_accelerator("cpu", False), build(), NextToken(), DATA, Plan(steps, 8))


def test_a_restored_trainer_continues_bit_by_bit(tmp_path: Path) -> None:
    whole, half, again = open_trainer(), open_trainer(), open_trainer()
    losses = [step.losses for step in whole.train()]
    first = [step.losses for step in islice(half.train(), 3)]
    save_checkpoint(half, tmp_path / "c.pt", FACTS)
    assert load_checkpoint([again], tmp_path / "c.pt") == FACTS
    assert first + [step.losses for step in again.train()] == losses
    ends = gather_weights(whole), gather_weights(again)
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


# PyTorch may raise its own error where the disk is full.
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64 vs 0")])
def test_a_failed_checkpoint_leaves_the_older_one(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = open_trainer()
    save_checkpoint(trainer, tmp_path / "c.pt", FACTS)
    before = (tmp_path / "c.pt").read_bytes()

    def fail(state: object, file: object) -> None:
        raise error

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(WeftError, match="cannot write"):
        save_checkpoint(trainer, tmp_path / "c.pt", FACTS)
    assert (tmp_path / "c.pt").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "text": lambda data: b"no checkpoint",
    "code": lambda data: b"cos\nsystem\n(S'true'\ntR.",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoints_are_refused(damage: str, tmp_path: Path) -> None:
    trainer = open_trainer()
    save_checkpoint(trainer, tmp_path / "c.pt", FACTS)
    (tmp_path / "c.pt").write_bytes(DAMAGE[damage]((tmp_path / "c.pt").read_bytes()))
    with pytest.raises(WeftError, match=r"c\.pt is not a checkpoint of this model"):
        load_checkpoint([trainer], tmp_path / "c.pt")

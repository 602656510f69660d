"""Checkpoints: all that a run needs to continue bit by bit, in one file."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from weft.ir.errors import WeftError
from weft.ir.storage import replace_file

from .trainer import Trainer

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # the first process has, or all read, all values
# Weights that no loss reaches, such as corrections of the choice of experts, have no state in the optimizer.
_PARTIAL = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)


def gather_weights(trainer: Trainer) -> dict[str, Any]:
    """Return the `state_dict` of the trained module, whole and on the CPU, in the first process; in others {}."""
    return get_model_state_dict(trainer.net, options=_WHOLE)


def save_checkpoint(trainer: Trainer, path: Path, facts: Mapping[str, Any]) -> None:
    """Replace the file `path` by a checkpoint of `trainer` and `facts` (floats, integers, strings). If this fails, the
    older checkpoint stays."""
    state = {
        "step": trainer.step,
        "elapsed": trainer.elapsed,
        "model": gather_weights(trainer),
        "optimizer": get_optimizer_state_dict(trainer.net, trainer.optimizer.optimizer, options=_WHOLE),
        "random": torch.get_rng_state(),
        "facts": dict(facts),
    }
    if trainer.accelerator.is_main_process:
        with replace_file(path) as partial, partial.open("wb") as file:
            try:
                torch.save(state, file)
            except RuntimeError as e:  # instead of the error of the file
                reason = str(e).splitlines()[0]
                raise OSError(errno.EIO, f"PyTorch cannot write it ({reason}): is the disk full?") from e
    trainer.accelerator.wait_for_everyone()


def load_checkpoint(trainers: Sequence[Trainer], path: Path) -> dict[str, Any]:
    """Set that of `trainers`, of one module, whose number is the fact ``phase``, to the state in the file `path`; those
    before it have done their plans. Return the facts that were saved.

    Raises:
        WeftError: if the file is missing, damaged, or of another model.
    """
    try:
        state = torch.load(path, weights_only=True)
        facts = dict(state["facts"])
        trainer = trainers[facts["phase"]]
        set_model_state_dict(trainer.net, state["model"], options=_WHOLE)
        optimizer = trainer.optimizer.optimizer
        set_optimizer_state_dict(trainer.net, optimizer, optim_state_dict=state["optimizer"], options=_PARTIAL)
        torch.set_rng_state(state["random"])
        trainer.step, trainer.elapsed = int(state["step"]), float(state["elapsed"])
        for earlier, elapsed in zip(trainers, facts["elapsed"], strict=False):
            earlier.elapsed = float(elapsed)
        return facts
    except Exception as e:  # torch raises errors of any class for damaged files
        reason = " ".join(str(e).split())[:200] or type(e).__name__
        raise WeftError(f"{path} is not a checkpoint of this model ({reason}): restore it, or begin a new run") from e

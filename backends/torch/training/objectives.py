"""Losses that a module is trained with."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batches import WindowBatch


class Objective(Protocol):
    """A loss of a module on a batch."""

    def __call__(self, net: nn.Module, batch: WindowBatch) -> dict[str, Tensor]:
        """Return the terms of the loss by name, means over the windows of `batch`; training minimizes their sum. The
        term ``loss`` is also reported by validation."""
        ...


class NextToken:
    """The mean cross-entropy in nats of the tokens of a window given those before, and auxiliary losses of layers."""

    def __call__(self, net: nn.Module, batch: WindowBatch) -> dict[str, Tensor]:
        logits, auxiliary = split_outputs(net(batch.windows[:, :-1]))
        entropy = F.cross_entropy(logits.flatten(0, 1).float(), batch.windows[:, 1:].flatten())
        return {"loss": entropy, "aux_loss": auxiliary}


def split_outputs(outputs: Any) -> tuple[Tensor, Tensor]:
    """Return (logits, sum of the auxiliary losses) of the `outputs` of a module."""
    logits, *losses = outputs if isinstance(outputs, tuple) else (outputs,)
    return logits, sum(losses, torch.zeros((), device=logits.device))

"""Losses that a module is trained with."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from inspect import signature
from typing import Any, Protocol

import numpy as np
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


class MaskedTokens:
    """The mean cross-entropy in nats of 15 % of the tokens of a window given the window without them (Devlin 2018,
    arXiv 1810.04805, section 3.1), and auxiliary losses of layers.

    Of these tokens 80 % are replaced by `mask`, 10 % by any token below `vocab`, and 10 % stay. `special` tokens are
    never among them. The choice depends on the window alone, so runs continue, and processes share a batch, exactly.

    index: the position of the logits in the outputs of a module.
    """

    def __init__(self, mask: int, vocab: int, special: Sequence[int] = (), index: int = 0) -> None:
        self.mask, self.vocab, self.special, self.index = mask, vocab, [mask, *special], index

    def __call__(self, net: nn.Module, batch: WindowBatch) -> dict[str, Tensor]:
        hidden, targets = (part.to(batch.windows.device) for part in self.hide(batch.windows))
        outputs = run_windows(net, hidden)
        logits, auxiliary = outputs[self.index].float(), [loss for loss in outputs if loss.dim() == 0]
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        count = (targets >= 0).sum().clamp(min=1)
        return {"loss": total / count, "aux_loss": sum(auxiliary, torch.zeros((), device=logits.device))}

    def hide(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return `windows` [n, length] with tokens replaced, and the tokens to predict [n, length], -1 elsewhere."""
        ids = windows.cpu().numpy()
        hidden, targets = ids.copy(), np.full_like(ids, -1)
        for row, shown, target in zip(ids, hidden, targets, strict=True):
            random = np.random.default_rng(zlib.crc32(row.tobytes()))
            places = random.permutation(np.flatnonzero(~np.isin(row, self.special)))
            chosen = places[: round(0.15 * len(places)) or 1]
            masked, replaced, _ = np.split(chosen, [round(0.8 * len(chosen)), round(0.9 * len(chosen))])
            target[chosen] = row[chosen]
            shown[masked], shown[replaced] = self.mask, random.integers(self.vocab, size=len(replaced))
        return torch.from_numpy(hidden), torch.from_numpy(targets)


def split_outputs(outputs: Any) -> tuple[Tensor, Tensor]:
    """Return (logits, sum of the auxiliary losses) of the `outputs` of a module."""
    logits, *losses = outputs if isinstance(outputs, tuple) else (outputs,)
    return logits, sum(losses, torch.zeros((), device=logits.device))


def run_windows(net: nn.Module, windows: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs of `net` for windows of valid tokens; of a decoder the logits of one token."""
    inputs = {
        "last": torch.zeros(len(windows), dtype=torch.long, device=windows.device),
        "attention_mask": torch.ones_like(windows),
        "token_type_ids": torch.zeros_like(windows),
    }
    names = [n for n, p in signature(net.forward).parameters.items() if n == "last" or p.default is p.empty]
    outputs = net(windows, **{name: inputs[name] for name in names if name in inputs})
    return outputs if isinstance(outputs, tuple) else (outputs,)

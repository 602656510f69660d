"""Sampling of tokens on the device, with the same results as the samplers of the host but without copying logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...torch.kernels.choose_tokens import TICKETS, choose_tokens
from ...torch.kernels.shared.tickets import Tickets
from ..core.sampler import Sampler, Sampling


def can_draw(samplers: Sequence[Sampler]) -> bool:
    """Return whether a `DeviceSampler` can replace `samplers`: not if they penalize repetition or bias logits."""
    return not any(s.sampling.adjusts for s in samplers)


class DeviceSampler:
    """A device sampler for `batch` rows with the same sampling options, with tensors at fixed addresses.

    Each row draws the first token whose cumulative probability exceeds u, a random number of the row's host sampler.
    It uses up no random number if only one token can follow. `most` is the number of random numbers stored per row.
    """

    def __init__(self, sampling: Sampling, batch: int, most: int, device: torch.device) -> None:
        self.sampling = sampling
        self._uniforms = torch.zeros(batch, most, dtype=torch.float64, device=device)
        self._spent = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._tickets = Tickets(TICKETS)

    def refill(self, samplers: Sequence[Sampler]) -> None:
        """Replace the random numbers of each row by the next ones of its sampler in `samplers`."""
        if self.sampling.temperature > 0:
            most = self._uniforms.shape[1]
            self._uniforms.copy_(torch.from_numpy(np.stack([s.uniforms(most) for s in samplers])))
        self._spent.zero_()

    @property
    def mutable(self) -> list[Tensor]:
        """Return the tensors that a draw changes."""
        return [self._spent]

    def __call__(self, logits: Tensor, begun: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Draw the next tokens [batch] from `logits` [batch, vocab]. `begun` are the input tensors of the next step
        (ids, positions, active), see `choose_tokens`."""
        s = self.sampling
        return choose_tokens(
            logits,
            self._uniforms,
            self._spent,
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            begun=begun,
            tickets=self._tickets(logits),
        )

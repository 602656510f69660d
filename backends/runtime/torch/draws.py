"""Drawing tokens where the logits are: what the samplers of the rows draw, without bringing logits to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...torch.kernels.choose_tokens import TICKETS, choose_tokens
from ...torch.kernels.shared.tickets import Tickets
from ..core.sampling import Sampler, Sampling


def can_draw(samplers: Sequence[Sampler]) -> bool:
    """Return whether a `Draws` can replace `samplers`: not if they penalize repetition or bias logits."""
    return not any(s.sampling.adjusts for s in samplers)


class Draws:
    """Draws for rows that all sample in one way, at fixed addresses.

    A row draws token i with probability p_i by one number u of its own sampler: the first whose cumulative probability
    exceeds u. As there, no number is spent where only one token can follow.
    """

    def __init__(self, sampling: Sampling, batch: int, most: int, device: torch.device) -> None:
        self.sampling = sampling
        self._uniforms = torch.zeros(batch, most, dtype=torch.float64, device=device)
        self._spent = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._tickets = Tickets(TICKETS)

    def refill(self, samplers: Sequence[Sampler]) -> None:
        """Draw by the numbers of `samplers` from now on."""
        if self.sampling.temperature > 0:
            most = self._uniforms.shape[1]
            self._uniforms.copy_(torch.from_numpy(np.stack([s.uniforms(most) for s in samplers])))
        self._spent.zero_()

    @property
    def mutable(self) -> list[Tensor]:
        """Tensors that a draw changes."""
        return [self._spent]

    def __call__(self, logits: Tensor, begun: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The next tokens [batch] after `logits` [batch, vocab]; `begun` is what the next step reads, as
        `choose_tokens` says."""
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

"""Sampling of tokens on the device, with the same results as the samplers of the host but without copying logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...torch.kernels.choose_tokens import TICKETS, choose_tokens
from ...torch.kernels.shared.tickets import Tickets
from ..core.sampler import Sampler, Sampling


class DeviceSampler:
    """A sampler on the device for `batch` rows with equal sampling options, without penalties and logit bias; its
    tensors have fixed addresses. Each row has a copy of the next `most` random numbers of its host sampler. A draw uses
    up one of them and takes the first token whose cumulative probability exceeds it. If only one token can follow, none
    is used up."""

    def __init__(self, sampling: Sampling, batch: int, most: int, device: torch.device) -> None:
        self.sampling = sampling
        self._uniforms = torch.zeros(batch, most, dtype=torch.float64, device=device)
        self._spent = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._tickets = Tickets(TICKETS)

    def refill(self, samplers: Sequence[Sampler]) -> None:
        """Replace the random numbers of each row by the next ones of its host sampler in `samplers` (one per row; none
        at temperature 0), and count them as unused."""
        if self.sampling.temperature > 0:
            most = self._uniforms.shape[1]
            self._uniforms.copy_(torch.from_numpy(np.stack([s.draw_uniforms(most) for s in samplers])))
        self._spent.zero_()

    @property
    def changed_tensors(self) -> list[Tensor]:
        """Return the tensors that a draw changes: the number of random numbers used up, [batch, 1]."""
        return [self._spent]

    def __call__(self, logits: Tensor, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Draw the next tokens from `logits` [batch, vocab] and return them [batch]. For active rows, also write them
        to `inputs`, the tensors (ids, positions, active) that the next step reads."""
        s = self.sampling
        return choose_tokens(
            logits,
            self._uniforms,
            self._spent,
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            begun=inputs,
            tickets=self._tickets(logits),
        )

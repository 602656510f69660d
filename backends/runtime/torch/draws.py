"""Drawing tokens where the logits are: what the samplers of the rows draw, without bringing logits to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...torch.package.shipped.sampling import filtered
from ..core.sampling import Sampler, Sampling


def can_draw(samplers: Sequence[Sampler]) -> bool:
    """Return whether a `Draws` can replace `samplers`: not if they penalize repetition."""
    return all(s.sampling.repetition_penalty == 1 for s in samplers)


class Draws:
    """Draws for rows that all sample in one way, at fixed addresses.

    A row draws token i with probability p_i by one number u of its own sampler: the first whose cumulative probability
    exceeds u. As there, no number is spent where only one token can follow.
    """

    def __init__(self, sampling: Sampling, batch: int, most: int, device: torch.device) -> None:
        self.sampling = sampling
        self._uniforms = torch.zeros(batch, most, dtype=torch.float64, device=device)
        self._spent = torch.zeros(batch, 1, dtype=torch.int64, device=device)

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

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The next tokens [batch] after `logits` [batch, vocab] float32, −1 where those are not numbers; and the
        largest of each row."""
        best, token = logits.max(-1)
        s = self.sampling
        if s.temperature > 0:
            p = filtered(logits, s.temperature, s.top_k, s.top_p, s.min_p).softmax(-1)
            total = p.cumsum(-1, dtype=torch.float64)
            u = self._uniforms.gather(1, self._spent)
            # Sums in f64, as in the sampler on the host, so that both draw alike; rounded, they do not end at 1.
            at = torch.searchsorted(total, u * total[:, -1:], right=True)
            last = torch.searchsorted(total, total[:, -1:].contiguous())  # of those that can be drawn
            token = torch.minimum(at, last)[:, 0]
            self._spent += (p > 0).sum(-1, keepdim=True) > 1
        return torch.where(best.isfinite(), token, -1), best

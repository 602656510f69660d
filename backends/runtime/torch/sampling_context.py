"""Contexts whose steps sample tokens on the device: the host reads a token while the next step runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..arrays import Bools, Ints
from ..core.batch_context import BatchContext
from ..core.sampler import Sampler
from .cuda_graphs import CapturedSteps
from .device_sampling import DeviceSampler, can_draw


class DrawingContext(BatchContext):
    """A batch whose `steps` may sample on the device. Others that change rows first `settle`: drop the next step.

    Raises as `BatchContext` does.
    """

    steps: CapturedSteps

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._draws: DeviceSampler | None = None
        self._loaded: Bools | None = None  # the active rows whose next step is on the device already
        self._ahead = False  # that step has begun

    def drawing(self, samplers: Sequence[Sampler]) -> Callable[[Ints, Bools], Ints] | None:
        """Return a function (tokens [batch], active [batch]) → next tokens [batch]: it runs a step of the active rows,
        as `step` does, and draws on the device. Return None if a sampler needs the logits on the host."""
        if not can_draw(samplers):
            return None
        # Rows differ only in their seeds, and each draws with the random numbers of its own sampler.
        sampling = replace(samplers[0].sampling, seed=None)
        if self._draws is None or self._draws.sampling != sampling:
            # Captured steps hold the addresses of the old draws.
            self.steps.forget()
            self._draws = DeviceSampler(sampling, self.lengths.size, self.capacity, self.steps.ids.device)
        self._draws.refill(samplers)
        return self._draw

    def settle(self) -> None:
        """Discard the next step that was loaded on the device."""
        self._loaded, self._ahead = None, False

    @abstractmethod
    def load_step(self, rows: Ints, tokens: Ints) -> None:
        """Copy the inputs of the next step to the device: `tokens` for `rows`; other rows repeat their last step."""

    def record_step(self, rows: Ints, tokens: Ints) -> None:
        """Record that the device has run `tokens` in `rows`; called before `lengths` counts these tokens."""

    def _draw(self, tokens: Ints, active: Bools) -> Ints:
        """Run a step with `tokens` [batch] in the `active` rows; return the next tokens [batch], drawn on the device.

        The following step begins before the host has read these tokens, so the device never waits. A row that has ended
        then writes one key that is masked for all queries. Models with recurrent states begin a step only on request.
        """
        rows = np.flatnonzero(active)
        self._check_room(rows)
        self._intact = False
        with self.running(), torch.inference_mode():
            if not self._ahead:
                self.steps.drop()
                self._launch(rows, tokens, active)
            ahead = self._rewinds and int(self.lengths[rows].max()) + 1 < self.capacity
            # Not the same: a row has ended since the current step began.
            same = self._loaded is not None and np.array_equal(self._loaded, active)
            if ahead and same:
                assert self._draws is not None
                self.steps.launch(self._draws, min(self.keys() + 1, self.capacity))
            drawn = self.steps.pop_tokens(rows)
            self.record_step(rows, tokens[rows])
            self._append(rows, tokens[rows])
            if ahead and not same:
                self._launch(rows, drawn, active)
        self._ahead, self._intact = ahead, True
        return drawn

    def _launch(self, rows: Ints, tokens: Ints, active: Bools) -> None:
        """Begin a step with `tokens` [batch] in `rows`, the indices of the `active` rows."""
        assert self._draws is not None
        if self._loaded is None or not np.array_equal(self._loaded, active):
            self.load_step(rows, tokens[rows])
            self.steps.active.copy_(torch.from_numpy(active[:, None]))
        self.steps.launch(self._draws, self.keys())
        self._loaded = active.copy()

    def keys(self) -> int:
        """Return the maximum number of keys that a step attends to."""
        return min(int(self.lengths.max()) + 1, self.capacity)

    @abstractmethod
    def running(self) -> Any:
        """Return a context manager for steps that converts errors of the runtime to WeftError."""

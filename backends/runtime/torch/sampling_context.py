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
from .cuda_graphs import CapturedSteps, DeviceSampler


class SamplingContext(BatchContext):
    """A batch context whose `steps` can sample on the device: while the host reads the tokens of a step, the device
    runs the next step already. `discard_step` discards that next step before rows change."""

    steps: CapturedSteps

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._device_sampler: DeviceSampler | None = None
        self._loaded: Bools | None = None  # the active rows whose next step is on the device already
        self._ahead = False  # that step has begun

    def new_sampling_step(self, samplers: Sequence[Sampler]) -> Callable[[Ints, Bools], Ints] | None:
        """Return a function (tokens [batch], active [batch]) → next tokens [batch], which runs a step of active rows
        and draws on the device; None with penalties or a bias. `samplers` may differ in their seeds only."""
        if any(s.sampling.has_adjustments for s in samplers):
            return None
        # Rows differ only in their seeds, and each draws with the random numbers of its own sampler.
        sampling = replace(samplers[0].sampling, seed=None)
        if self._device_sampler is None or self._device_sampler.sampling != sampling:
            # Captured steps hold the addresses of the old draws.
            self.steps.release_graphs()
            self._device_sampler = DeviceSampler(sampling, self.lengths.size, self.capacity, self.steps.ids.device)
        self._device_sampler.refill(samplers)
        return self._sample_step

    def discard_step(self) -> None:
        self._loaded, self._ahead = None, False

    @abstractmethod
    def load_step(self, rows: Ints, tokens: Ints) -> None:
        """Copy the inputs of the next step to the device: `tokens` for `rows`; other rows repeat their last token."""

    def record_step(self, rows: Ints, tokens: Ints) -> None:
        """Record that row `rows[i]` has run `tokens[i]`, for each i; `lengths` does not count these tokens yet."""

    def _sample_step(self, tokens: Ints, active: Bools) -> Ints:
        """Run a step with `tokens` [batch] in the `active` rows; return the next tokens [batch], drawn on the device.
        If the same rows are active as before, the following step begins before the host reads these tokens; a row that
        ends meanwhile writes one more key, which no query sees. No step begins early if rows cannot drop tokens."""
        rows = np.flatnonzero(active)
        self._check_room(rows)
        self._intact = False
        with self.convert_errors(), torch.inference_mode():
            if not self._ahead:
                self.steps.drop_pending()
                self._launch_step(rows, tokens, active)
            ahead = self._can_rewind and int(self.lengths[rows].max()) + 1 < self.capacity
            # Not the same: a row has ended since the current step began.
            same = self._loaded is not None and np.array_equal(self._loaded, active)
            if ahead and same:
                assert self._device_sampler is not None
                self.steps.launch_step(self._device_sampler, min(self.count_keys() + 1, self.capacity))
            drawn = self.steps.pop_tokens(rows)
            self.record_step(rows, tokens[rows])
            self._record_tokens(rows, tokens[rows])
            if ahead and not same:
                self._launch_step(rows, drawn, active)
        self._ahead, self._intact = ahead, True
        return drawn

    def _launch_step(self, rows: Ints, tokens: Ints, active: Bools) -> None:
        """Queue a step with `tokens` [batch] in the `active` [batch] rows, whose indices are `rows`."""
        assert self._device_sampler is not None
        if self._loaded is None or not np.array_equal(self._loaded, active):
            self.discard_step()
            self.load_step(rows, tokens[rows])
            self.steps.active.copy_(torch.from_numpy(active[:, None]))
        self.steps.launch_step(self._device_sampler, self.count_keys())
        self._loaded = active.copy()

    def count_keys(self) -> int:
        """Return the largest number of keys that a row attends to in the next step."""
        return min(int(self.lengths.max()) + 1, self.capacity)

    @abstractmethod
    def convert_errors(self) -> Any:
        """Return a context manager that converts errors of the runtime inside its block to WeftError."""

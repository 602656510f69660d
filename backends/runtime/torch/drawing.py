"""Contexts whose steps draw tokens on the device: the host reads a token while the step behind it runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..arrays import Bools, Ints
from ..core.rows import BatchContext
from ..core.sampling import Sampler
from .draws import Draws, can_draw
from .steps import Steps


class DrawingContext(BatchContext):
    """A batch whose `steps` may draw. What moves rows without them calls `settle` first.

    Raises as `BatchContext` does.
    """

    steps: Steps

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._draws: Draws | None = None
        self._following: Bools | None = None  # the active rows whose next step the device knows already
        self._ahead = False  # that step has begun

    def drawing(self, samplers: Sequence[Sampler]) -> Callable[[Ints, Bools], Ints] | None:
        """Return a function that appends a token to the active rows, as `step` does, and samples the next ones; None if
        the host must."""
        if not can_draw(samplers):
            return None
        # Rows differ in their seeds only, and each draws by the numbers of its own sampler.
        sampling = replace(samplers[0].sampling, seed=None)
        if self._draws is None or self._draws.sampling != sampling:
            # Captured steps hold the addresses of the old draws.
            self.steps.forget()
            self._draws = Draws(sampling, self.lengths.size, self.capacity, self.steps.ids.device)
        self._draws.refill(samplers)
        return self._draw

    def settle(self) -> None:
        """Forget what the device knows of the next step."""
        self._following, self._ahead = None, False

    @abstractmethod
    def tell(self, rows: Ints, tokens: Ints) -> None:
        """Tell the device the next step: that of `rows`, while the others repeat their last."""

    def noted(self, rows: Ints, tokens: Ints) -> None:
        """Take note of a step of `rows` that the device has taken; `lengths` are those before it."""

    def _draw(self, tokens: Ints, active: Bools) -> Ints:
        """A step whose tokens the device draws; the next one begins before the host has seen them, so that the device
        never waits for it.

        Rows that turn out to have ended then leave a key behind that nobody sees; where that would be a state, a step
        begins when it is asked for.
        """
        rows = np.flatnonzero(active)
        self._check_room(rows)
        self._intact = False
        with self.running(), torch.inference_mode():
            if not self._ahead:
                self.steps.drop()
                self._launch(rows, tokens, active)
            ahead = self._rewinds and int(self.lengths[rows].max()) + 1 < self.capacity
            # Else a row has ended since the step under way began.
            same = self._following is not None and np.array_equal(self._following, active)
            if ahead and same:
                assert self._draws is not None
                self.steps.launch(self._draws, min(self.keys() + 1, self.capacity))
            drawn = self.steps.drawn(rows)
            self.noted(rows, tokens[rows])
            self._append(rows, tokens[rows])
            if ahead and not same:
                self._launch(rows, drawn, active)
        self._ahead, self._intact = ahead, True
        return drawn

    def _launch(self, rows: Ints, tokens: Ints, active: Bools) -> None:
        """Begin a step of `rows`, the `active` ones."""
        assert self._draws is not None
        if self._following is None or not np.array_equal(self._following, active):
            self.tell(rows, tokens[rows])
            self.steps.active.copy_(torch.from_numpy(active[:, None]))
        self.steps.launch(self._draws, self.keys())
        self._following = active.copy()

    def keys(self) -> int:
        """Return the number of keys that a step may attend to."""
        return min(int(self.lengths.max()) + 1, self.capacity)

    @abstractmethod
    def running(self) -> Any:
        """A context in which steps run: it names what fails."""

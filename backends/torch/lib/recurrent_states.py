"""States of recurrences, which are stored between forward passes."""

from __future__ import annotations

from torch import Tensor


class RecurrentState:
    """The state of a recurrence: the tensors `values`, which are zero at the start of a sequence."""

    growth = "constant"

    def __init__(self, *values: Tensor) -> None:
        self.values = values


class FilledState(RecurrentState):
    """A state whose tensors are filled with `starts` instead of zero at the start of a sequence."""

    def __init__(self, *values: Tensor, starts: tuple[float, ...]) -> None:
        super().__init__(*values)
        self.starts = starts


def previous_state(state: RecurrentState | None) -> Tensor | tuple[Tensor, ...] | None:
    """Return the values of `state`: a tensor if there is one, else a tuple; None without a state (no cache)."""
    if state is None:
        return None
    return state.values if len(state.values) > 1 else state.values[0]


def store_state(state: RecurrentState | None, made: tuple[Tensor, Tensor | tuple[Tensor, ...]]) -> Tensor:
    """Return the result in `made`, (result, new state), and copy the new state into `state`, if there is one."""
    y, after = made
    if state is not None:
        for old, new in zip(state.values, after if isinstance(after, tuple) else (after,), strict=True):
            old.copy_(new)
    return y

"""State of a recurrence, from call to call."""

from __future__ import annotations

from torch import Tensor


class State:
    """Tensors that a recurrence carries from call to call, zero at the start of a text."""

    growth = "constant"

    def __init__(self, *values: Tensor) -> None:
        self.values = values


class FilledState(State):
    """Tensors that begin a text filled with other numbers than zero: `starts`."""

    def __init__(self, *values: Tensor, starts: tuple[float, ...]) -> None:
        super().__init__(*values)
        self.starts = starts


def resumed(state: State | None) -> Tensor | tuple[Tensor, ...] | None:
    """Return the state after the calls so far; None without a cache."""
    if state is None:
        return None
    return state.values if len(state.values) > 1 else state.values[0]


def keep(state: State | None, made: tuple[Tensor, Tensor | tuple[Tensor, ...]]) -> Tensor:
    """The result of a recurrence, of which `made` also holds the state after it: that is written into `state`."""
    y, after = made
    if state is not None:
        for old, new in zip(state.values, after if isinstance(after, tuple) else (after,), strict=True):
            old.copy_(new)
    return y

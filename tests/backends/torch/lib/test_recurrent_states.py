"""States of recurrences between calls."""

from __future__ import annotations

import pytest
import torch

from weft.backends.torch.lib.recurrent_states import FilledState, RecurrentState, previous_state, store_state


def test_a_state_of_one_tensor_is_read_as_a_tensor_and_of_two_as_a_tuple() -> None:
    a, b = torch.zeros(1), torch.ones(2)
    assert previous_state(None) is None
    assert previous_state(RecurrentState(a)) is a
    assert previous_state(FilledState(a, b, starts=(0.0, 1.0))) == (a, b)


def test_store_state_copies_into_the_tensors_of_the_state() -> None:
    a, b, y = torch.zeros(2), torch.zeros(1), torch.ones(3)
    assert store_state(RecurrentState(a, b), (y, (torch.full((2,), 5.0), torch.full((1,), 6.0)))) is y
    assert (a.tolist(), b.tolist()) == ([5, 5], [6])
    store_state(RecurrentState(a), (y, torch.tensor([7.0, 8.0])))
    assert a.tolist() == [7, 8]


def test_store_state_without_a_cache_returns_the_result() -> None:
    y = torch.ones(3)
    assert store_state(None, (y, torch.zeros(1))) is y


def test_store_state_refuses_another_number_of_states() -> None:
    with pytest.raises(ValueError, match="zip"):
        store_state(RecurrentState(torch.zeros(1)), (torch.ones(1), (torch.zeros(1), torch.zeros(1))))

"""States of recurrences in caches of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache

from weft.backends.torch.transformers.lib.cached_states import count_tokens, keep_states, mask_hidden, past_states


class States:
    """A cache of one layer with two states, as transformers stores them."""

    def __init__(self) -> None:
        self.layers = [SimpleNamespace(has_previous_state={0: False, 1: False}, recurrent_states={})]

    def update_recurrent_state(self, state: Any, layer_idx: int, i: int) -> None:
        self.layers[layer_idx].recurrent_states[i] = state


def test_states_are_none_before_the_first_token_and_kept_after() -> None:
    cache: Any = States()
    assert past_states(cache, 0) is past_states(cache, 0, 0, 2) is past_states(None, 0) is None
    a, b, y = torch.zeros(1), torch.ones(1), torch.ones(2)
    assert keep_states(cache, 0, (y, (a, b))) is y
    assert past_states(cache, 0) is a and past_states(cache, 0, 1) is b
    assert past_states(cache, 0, 0, 2) == (a, b)
    keep_states(cache, 0, (y, y), 1)
    assert past_states(cache, 0, 1) is y
    assert keep_states(None, 0, (y, a)) is y


def test_padding_is_zeroed() -> None:
    x = torch.ones(1, 3, 2)
    assert mask_hidden(x, None) is x
    assert mask_hidden(x, torch.tensor([[0, 1, 1]]))[0, :, 0].tolist() == [0, 1, 1]


def test_tokens_are_counted_without_keys() -> None:
    cache = DynamicCache()
    cache.update(torch.zeros(2, 1, 3, 1), torch.zeros(2, 1, 3, 1), 0)
    count_tokens(cache, torch.zeros(2, 4, 8))
    assert cache.get_seq_length() == 7

"""Positions in left-padded rows, and visible keys of masks."""

from __future__ import annotations

import torch

from weft.backends.torch.transformers.lib.padded_positions import first_visible, given_mask, visible

DISTANCE = torch.tensor([[[-1, 0, 1]]])


def test_first_visible_token_of_each_row() -> None:
    x = torch.zeros(3, 4, 2)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]])
    assert first_visible(x, mask).tolist() == [2, 0, 3]
    assert first_visible(x, None).tolist() == [0, 0, 0]


def test_visible_keys_of_boolean_and_additive_masks() -> None:
    shown = torch.tensor([[[[True, False, True]]]])
    assert visible(shown, DISTANCE) is shown
    assert torch.equal(visible(torch.zeros(1, 1, 1, 3).masked_fill(~shown, -1e9), DISTANCE), shown)


def test_without_mask_distances_decide() -> None:
    assert visible(None, DISTANCE).tolist() == [[[[True, True, False]]]]
    assert visible(None, DISTANCE, causal=False).tolist() == [[[[True, True, True]]]]


def test_padding_mask_is_passed_on() -> None:
    mask = torch.ones(1, 2)
    assert given_mask(mask, cache=None) is mask and given_mask() is None

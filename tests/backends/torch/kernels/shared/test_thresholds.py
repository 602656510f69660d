"""Sampling thresholds without a sort: keys in the order of logits, and a search for the key of a total weight."""

from __future__ import annotations

import math

import pytest
import torch

from weft.backends.torch.kernels.shared.launch import jit, tl
from weft.backends.torch.kernels.shared.thresholds import (
    LOWEST,
    TOKENS,
    key_to_logit,
    order_key,
    search_key,
    token_weights,
    total_weight,
)

LOGITS = [2.0, -1.0, 3.0, 0.5, 3.0, -4.0, 1.0]


@jit
def keys_kernel(x, keys, back):
    at = tl.arange(0, 16)
    key = order_key(tl.load(x + at))
    tl.store(keys + at, key)
    tl.store(back + at, key_to_logit(key))


@jit
def search_kernel(values, found, above, count, largest, temperature, min_p, target, ALIKE: tl.constexpr):
    key, weight = search_key(values, None, count, largest, temperature, LOWEST, TOKENS, min_p, target, False, ALIKE, 4)
    tl.store(found, key_to_logit(key))
    tl.store(above, weight)


@jit
def total_kernel(values, weights, total, number, end, count, largest, temperature, min_p):
    at = tl.arange(0, 8)
    tl.store(weights + at, token_weights(tl.load(values + at, mask=at < count, other=0.0), largest, temperature))
    together, many, last = total_weight(values, None, count, largest, temperature, LOWEST, TOKENS, min_p, 4)
    tl.store(total, together)
    tl.store(number, many)
    tl.store(end, last)


def test_keys_are_in_the_order_of_floats_and_invertible(device: torch.device) -> None:
    x = torch.tensor([-torch.inf, -3e38, -2.5, -2.0, -1e-30, 0.0, 1e-45, 1e-30, 0.5, 1, 1.0000001, 2, 7, 3e38])
    x = torch.cat((x, torch.tensor([torch.inf, -0.0]))).to(device)
    keys, back = torch.empty(16, dtype=torch.int64, device=device), torch.empty(16, device=device)
    keys_kernel[(1,)](x, keys, back)
    assert torch.all(keys[:15].diff() > 0)
    assert torch.equal(back, x)
    assert keys[15] == keys[5]  # −0 is 0


def search(
    device: torch.device, target: float, alike: bool, temperature: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """Return the logit at which candidates of this size or larger weigh `target`, and the weight of the larger."""
    values = torch.tensor(LOGITS, device=device)
    found, above = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.float64, device=device)
    search_kernel[(1,)](values, found, above, len(LOGITS), 3.0, temperature, min_p, target, ALIKE=alike)
    return [found.item(), above.item()]


@pytest.mark.parametrize(("k", "least", "above"), [(1, 3.0, 0), (2, 3.0, 0), (3, 2.0, 2), (5, 0.5, 4), (7, -4.0, 6)])
def test_top_k_is_the_kth_largest_logit(device: torch.device, k: int, least: float, above: int) -> None:
    assert search(device, k, alike=True) == [least, above]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_top_p_is_the_logit_where_weights_add_up(device: torch.device, temperature: float) -> None:
    """Two tokens weigh 1 each, the next e^(−1 / temperature)."""
    third = math.exp(-1 / temperature)
    assert search(device, 2.0, False, temperature) == [3.0, 0]
    least, above = search(device, 2 + third / 2, False, temperature)
    assert (least, above) == (2.0, 2.0)
    least, above = search(device, 2 + third * 1.01, False, temperature)
    assert least == 1.0 and above == pytest.approx(2 + third)


def test_min_p_drops_unlikely_candidates(device: torch.device) -> None:
    assert search(device, 3, alike=True, min_p=0.2) == [2.0, 2]  # e^−1 is above 0.2, e^−2 is not
    values = torch.tensor(LOGITS, device=device)
    weights, total = torch.empty(8, device=device), torch.zeros(1, dtype=torch.float64, device=device)
    number, end = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    total_kernel[(1,)](values, weights, total, number, end, len(LOGITS), 3.0, 1.0, 0.2)
    torch.testing.assert_close(weights[:7].cpu(), (torch.tensor(LOGITS) - 3).exp())
    assert total.item() == pytest.approx(2 + math.exp(-1))
    assert (number.item(), end.item()) == (3, 4)  # the largest token that is kept is number 4

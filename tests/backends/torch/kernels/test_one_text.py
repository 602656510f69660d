"""Steps of one text on a CPU, which ask for its position and leave out what it does not see: as in a batch of two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.backends.torch.kernels.decode_attention import reference
from weft.backends.torch.kernels.shared.cached_keys import write_cache

CAPACITY = 12


def caches(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw keys and values [rows, 2, CAPACITY, 8], the same in every row."""
    k, v = torch.randn(2, 1, 2, CAPACITY, 8, generator=torch.Generator().manual_seed(0))
    return k.repeat(rows, 1, 1, 1), v.repeat(rows, 1, 1, 1)


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("position", [-1, 0, 5, CAPACITY - 1, CAPACITY, 40])
def test_writes(position: int, rolling: bool) -> None:
    one, two = caches(1)[0], caches(2)[0]
    new = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(1))
    before = one.clone()
    write_cache(one, new, torch.tensor([[position]]), rolling, 3)
    write_cache(two, new.repeat(2, 1, 1), torch.tensor([[position], [position]]), rolling, 3)
    assert torch.equal(one[0], two[0]) and torch.equal(one[0], two[1])
    assert torch.equal(one, before) == (position < 0 or (position >= CAPACITY and not rolling))


@pytest.mark.parametrize("position", [-1, 0, 5, CAPACITY - 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0},
        {"window": 3, "keep_first": 1},
        {"window": CAPACITY, "rolling": True},
        {"chunk": 4},
        {"dilation": 2},
        {"sinks": torch.tensor([0.3, -0.2, 0.1, 2.0])},
        {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    ],
    ids=str,
)
def test_attends(position: int, options: dict[str, Any]) -> None:
    q = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(2))
    one = reference(q, *caches(1), torch.tensor([position]), **options)
    # The other text is at the end of the cache, so that nothing of it can be left out.
    two = reference(q.repeat(2, 1, 1), *caches(2), torch.tensor([position, CAPACITY - 1]), **options)
    torch.testing.assert_close(one[0], two[0], rtol=1e-5, atol=1e-6)
    assert (position < 0) == (not one.any())

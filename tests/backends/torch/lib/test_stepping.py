"""Cache writes and recurrences of a decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.backends.torch.lib.caches import KeyCache, KVCache
from weft.backends.torch.lib.chunked_recurrences import causal_linear_attention
from weft.backends.torch.lib.recurrent_states import RecurrentState
from weft.backends.torch.lib.stepping import (
    linear_step,
    step_products,
    update_cache,
    update_cache_float8,
    update_latent_cache,
)

AT = torch.tensor([[2], [0]])  # a position per batch row


def test_update_cache_writes_each_row_at_its_position_and_returns_all_slots() -> None:
    cache = KVCache(2, 1, 4, 1, 1, torch.zeros(0))
    k, v = update_cache(cache, torch.full((2, 1, 1, 1), 3.0), torch.full((2, 1, 1, 1), 5.0), AT)
    assert k[..., 0].tolist() == [[[0, 0, 3, 0]], [[3, 0, 0, 0]]]
    assert v[..., 0].tolist() == [[[0, 0, 5, 0]], [[5, 0, 0, 0]]]
    latent = KeyCache(2, 1, 4, 1, torch.zeros(0))
    assert torch.equal(update_latent_cache(latent, torch.full((2, 1, 1, 1), 3.0), AT), k)


def test_update_cache_float8_stores_bytes_of_scaled_values() -> None:
    cache = KVCache(2, 1, 4, 1, 1, torch.zeros(0, dtype=torch.uint8))
    new = torch.tensor([3.0, 500.0]).view(2, 1, 1, 1)
    k, v = update_cache_float8(cache, new, new, AT, torch.tensor([2.0]), torch.tensor([1.0]))
    assert k.view(torch.float8_e4m3fn).float()[0, 0, 2, 0] == 1.5
    assert v.view(torch.float8_e4m3fn).float()[1, 0, 0, 0] == 448  # the largest value of e4m3
    assert k.view(torch.float8_e4m3fn).float()[1, 0, 0, 0] == 256  # 250, half to even


def test_linear_step_is_one_token_of_causal_linear_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.rand(2, 4, 6, generator=generator, dtype=torch.float64) + 0.1 for _ in range(2))
    rq, rk, v = (torch.randn(2, 4, n, generator=generator, dtype=torch.float64) for n in (6, 6, 8))
    wanted, final = causal_linear_attention(q, k, rq, rk, v, None, heads=2)
    state = RecurrentState(*(torch.zeros_like(t) for t in final))
    rows = [linear_step(state, *(t[:, i : i + 1] for t in (q, k, rq, rk, v)), 2) for i in range(4)]
    torch.testing.assert_close(torch.cat(rows, 1), wanted)
    for found, last in zip(state.values, final, strict=True):
        torch.testing.assert_close(found, last)


def test_step_products_drops_the_token_axis_and_expands_to_the_batch() -> None:
    def function(state: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        assert state.dtype == x.dtype == weight.dtype == torch.float64
        return (state + x * weight,)

    state, x = torch.ones(3, 2), torch.tensor([[[1.0, 2.0]]])
    (y,) = step_products(function, (state,), (x,), (torch.full((2,), 10.0, dtype=torch.float64),))
    assert y.shape == (3, 1, 2)
    assert y[0, 0].tolist() == [11, 21]

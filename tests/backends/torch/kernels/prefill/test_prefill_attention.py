"""Attention of several tokens of each text to their caches, against one token after the other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from weft.backends.torch.kernels.decode_attention import decode_attention
from weft.backends.torch.kernels.prefill.prefill_attention import prefill_attention

from .....sampling import each
from ..oracles import draw

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "window": {"window": 5},
    "window that holds all": {"window": 40},
    "window, some stay": {"window": 4, "keep_first": 2},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 2, 4)},
    "chunks": {"chunk": 6},
    "every other": {"dilation": 2},
    "ALiBi": {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "floats of 8 bits": {"k_scale": torch.tensor([0.01, 0.02]), "v_scale": torch.tensor([0.03, 0.01])},
}


@pytest.mark.parametrize(("name", "at"), each(3, itertools.product(CASES, ((0, 1), (0, 17), (9, 2), (7, 10)))))
def test_several_tokens_attend_as_one_after_the_other(device: torch.device, name: str, at: tuple[int, int]) -> None:
    start, seq = at
    how = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in CASES[name].items()}
    q = draw(2, seq, 4, 16, seed=1, dtype=torch.float32, device=device)
    k, v = (draw(2, 2, 20, 16, seed=seed, dtype=torch.float32, device=device) for seed in (2, 3))
    if "k_scale" in how:
        k, v = (t.clamp(-2, 2).mul(100).to(torch.float8_e4m3fn).view(torch.uint8) for t in (k, v))
    positions = torch.arange(start, start + seq, device=device).expand(2, -1)
    made = decode_attention(q, k, v, positions, start=start, **how)
    assert made.shape == q.shape
    for i in range(seq):
        one = decode_attention(q[:, i], k, v, positions[:, i], **how, kernel=False)
        torch.testing.assert_close(made[:, i], one, rtol=1e-4, atol=1e-5)


def test_positions_outside_of_the_cache_are_refused() -> None:
    q, k = torch.zeros(1, 5, 2, 8), torch.zeros(1, 2, 12, 8)
    with pytest.raises(ValueError, match="5 tokens from position 8 on do not fit a cache of 12"):
        prefill_attention(q, k, k, 8)


def test_operands_that_do_not_fit_are_refused() -> None:
    q, k, at = torch.zeros(1, 5, 2, 8), torch.zeros(1, 2, 12, 8), torch.arange(5)[None]
    with pytest.raises(ValueError, match="a rolling cache takes one token at a time"):
        decode_attention(q, k, k, at, rolling=True, window=4)
    with pytest.raises(ValueError, match=r"positions \[1, 4\] must be one for each token of q \[1, 5, 2, 8\]"):
        decode_attention(q, k, k, at[:, 1:])
    with pytest.raises(ValueError, match=r"not \[batch, seq, heads, d\] and its caches"):
        decode_attention(q, k[..., :4], k, at)
    with pytest.raises(ValueError, match="2 query heads are not a multiple of 3 KV heads"):
        decode_attention(q, torch.zeros(1, 3, 12, 8), torch.zeros(1, 3, 12, 8), at)

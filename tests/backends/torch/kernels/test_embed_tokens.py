"""The beginning of a decode step against rows looked up one by one and angles in float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from weft.backends.torch.kernels.embed_tokens import embed_tokens, refusal

from .oracles import draw

reference = partial(embed_tokens, kernel=False)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("tables", [0, 1, 2])
@pytest.mark.parametrize(("dim", "scale", "learned"), [(24, 1.0, False), (700, 8.0, False), (40, 1.0, True)])
def test_rows_and_angles(
    device: torch.device, dtype: torch.dtype, tables: int, dim: int, scale: float, learned: bool
) -> None:
    weight, table = (draw(n, dim, seed=n, dtype=dtype, device=device) for n in (11, 300))
    ids = torch.tensor([[3], [10], [0]], device=device)
    positions = torch.tensor([[0], [217], [131_071 if not learned else 297]], device=device)
    rotary = [
        (10_000.0 ** -(torch.arange(n, dtype=torch.float64, device=device) / n), a) for n, a in ((5, 1.0), (130, 1.2))
    ]
    assert refusal(weight, tables) is None
    for compute in (embed_tokens, reference):
        x, *angles = compute(
            ids, weight, positions, *rotary[:tables], scale=scale, table=table if learned else None, offset=2
        )
        want = torch.stack([weight[i].double() * scale for i in ids[:, 0]])[:, None]
        if learned:
            want = want + torch.stack([table[p + 2].double() for p in positions[:, 0]])[:, None]
        assert x.dtype == dtype
        eps = torch.finfo(dtype).eps * (2 if learned and scale != 1 else 1)
        torch.testing.assert_close(x.double(), want, atol=eps, rtol=eps)
        for (frequencies, amplitude), cos, sin in zip(rotary[:tables], angles[::2], angles[1::2], strict=True):
            for found, turned in ((cos, math.cos), (sin, math.sin)):
                exact = [[amplitude * turned(p * f) for f in frequencies.tolist()] for p in positions[:, 0].tolist()]
                assert found.dtype == torch.float32
                torch.testing.assert_close(found.double().cpu(), torch.tensor(exact).double(), atol=3e-7, rtol=0)


def test_operands_that_do_not_fit_are_refused(device: torch.device) -> None:
    weight, ids = torch.zeros(4, 6, device=device), torch.zeros(2, 1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"ids \[2, 1\] and positions \[1, 1\] are not both \[batch, seq\]"):
        embed_tokens(ids, weight, ids[:1])
    with pytest.raises(ValueError, match=r"table \[4, 5\] does not fit weight \[4, 6\]"):
        embed_tokens(ids, weight, ids, table=weight[:, 1:])
    assert refusal(weight, 3) == "more than 2 tables of rotary angles"
    assert refusal(weight.double()) == "the kernel computes in f32"

"""W_h x_h per head against float64, and against the op that it implements."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from weft.backends.torch.kernels import linear_by_head as module
from weft.backends.torch.kernels.linear_by_head import linear_by_head
from weft.ir import ops

from .oracles import assert_near, draw

reference = partial(linear_by_head, kernel=False)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("rows", "heads", "outputs", "inputs", "dtype"),
    [(1, 3, 7, 9, FP32), (1, 2, 5, 512, BF16), (3, 4, 1, 33, FP16), (8, 2, 6, 130, FP32), (17, 2, 33, 70, BF16)],
)
def test_agrees_with_float64(
    device: torch.device, rows: int, heads: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    x = draw(rows, 1, heads * inputs, seed=1, dtype=dtype, device=device)
    weight = draw(heads * outputs, inputs, seed=2, dtype=dtype, device=device)
    parts = x.double().unflatten(-1, (heads, inputs)), weight.double().unflatten(0, (heads, outputs))
    exact, size = (
        torch.stack([a[:, :, h] @ b[h].T for h in range(heads)], 2).flatten(2)
        for a, b in (parts, [t.abs() for t in parts])
    )
    found = linear_by_head(x, weight, heads)
    assert found.dtype == dtype
    assert_near(found, exact, size, inputs)
    assert_near(reference(x, weight, heads), exact, size, inputs, inner=dtype)


def test_slices_of_wider_rows_are_not_copied(device: torch.device) -> None:
    x = draw(2, 20, seed=1, dtype=FP32, device=device)[:, 4:16]
    weight = draw(9, 4, seed=2, dtype=FP32, device=device)
    exact = torch.from_numpy(
        ops.head_linear.reference(x.double().cpu().numpy()[:, None], weight.double().cpu().numpy(), heads=3)
    )[:, 0]
    assert_near(linear_by_head(x, weight, 3, kernel=True), exact.to(device), torch.full((), 40.0, device=device), 4)


def test_unsupported_operands_fall_back_to_torch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "linear_by_head_kernel", None)  # not to be launched
    x, weight = draw(65, 6, seed=1, dtype=FP32, device=device), draw(4, 3, seed=2, dtype=FP32, device=device)
    exact = torch.cat([x[:, :3].double() @ weight[:2].double().T, x[:, 3:].double() @ weight[2:].double().T], 1)
    assert_near(linear_by_head(x, weight, 2), exact, torch.full((), 40.0, device=device), 3)
    for wrong, heads in ((weight, 3), (weight[:3], 2), (weight[0], 2)):
        with pytest.raises(ValueError, match="does not fit weight"):
            linear_by_head(x, wrong, heads)

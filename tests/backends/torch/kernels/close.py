"""Tolerances of kernels against formulas in float64."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rounded(x: NDArray[np.float64], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """x in `dtype` on `device`."""
    return torch.from_numpy(np.asarray(x)).to(device, dtype)


def exact(x: torch.Tensor) -> NDArray[np.float64]:
    """The numbers that x holds."""
    array: NDArray[np.float64] = x.detach().cpu().double().numpy()
    return array


def assert_close(
    got: torch.Tensor, want: NDArray[np.float64], terms: int, inner: tuple[int, torch.dtype] = (0, torch.float32)
) -> None:
    """`got` is `want`, rounded once to its dtype after sums of `terms` products in f32, against the largest of `want`.

    The bound: half a unit of the dtype, or a whole one in bf16, which Triton's interpreter cuts off and does not round;
    4 eps(f32) √terms; and half a unit again, or a whole one, for each of the `inner` roundings of operands on the way,
    to that dtype: they hit every term by itself, so that they do not grow with them.
    """
    assert got.shape == want.shape
    count, dtype = inner
    bound = 4 * torch.finfo(torch.float32).eps * terms**0.5 + _rounding(got.dtype) + count * _rounding(dtype)
    error = np.abs(exact(got) - want).max() / np.abs(want).max()
    assert error <= bound, f"{error:.2e} is more than {bound:.2e}"


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps * (1 if dtype == torch.bfloat16 else 0.5)

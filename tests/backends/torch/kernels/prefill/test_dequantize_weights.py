"""Weights in codes as numbers, against their formula code by code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.backends.torch.kernels.prefill import dequantize_weights as file
from weft.backends.torch.kernels.prefill.dequantize_weights import dequantize_weights
from weft.backends.torch.kernels.shared.quantized_gemv import Codes

from ..close import DTYPES, exact, rounded
from ..shared.test_quantized_gemv import EIGHT, NUMBERS, packed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("out", "width", "bits", "group", "offsets", "floats"),
    [
        (37, 1, 4, 1, False, False),
        (5, 320, 4, 32, True, False),
        (40, 192, 4, 64, False, False),
        (33, 96, 8, 96, True, False),
        (7, 100, 8, 100, False, True),
        (35, 384, 8, 128, False, True),
    ],
)
def test_dequantized_weights_agree_with_the_formula(
    device: torch.device, out: int, width: int, bits: int, group: int, offsets: bool, floats: bool, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(0)
    codes = rng.choice(NUMBERS, (out, width)) if floats else rng.integers(0, 1 << bits, (out, width))
    words = torch.from_numpy(packed(codes, bits)).to(device)
    scales, low = (rounded(rng.normal(size=(width // group, out)), torch.float32, device) for _ in range(2))
    weight = Codes(words.view(torch.float8_e4m3fn) if floats else words, scales, low if offsets else None, bits, width)
    numbers = EIGHT[codes] if floats else codes - (1 << (bits - 1))
    want = exact(scales).T.repeat(group, 1) * numbers + (exact(low).T.repeat(group, 1) if offsets else 0)
    unit = torch.finfo(dtype).eps  # the interpreter cuts off what a GPU rounds
    for made in (dequantize_weights(weight, dtype, kernel=True), file.dequantize_weights(weight, dtype, kernel=False)):
        assert made.dtype == dtype
        assert (
            np.abs(exact(made) - want) <= unit * np.abs(want) + 1e-6 + np.finfo(np.float16).smallest_subnormal
        ).all()


def test_unsupported_operands_fall_back_to_torch(device: torch.device) -> None:
    words = torch.from_numpy(packed(np.zeros((5, 64), np.int64), 8)).to(device)
    weight = Codes(words, torch.ones(1, 5, device=device), None, 8, 64)
    assert file.refusal(weight, torch.float64) == "torch.float64 is not one of bf16, fp16, fp32"
    assert dequantize_weights(weight, torch.float64).dtype == torch.float64
    strided = Codes(words.repeat_interleave(2, 1)[:, ::2], torch.ones(1, 5, device=device), None, 8, 64)
    assert file.refusal(strided, torch.float32) == "an operand is not contiguous"

"""Activations rounded to floats of 8 bits, against a search among all floats; and products of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from weft.backends.torch.kernels.prefill import quantize_float8 as file
from weft.backends.torch.kernels.prefill.quantize_float8 import quantize_float8
from weft.backends.torch.lib.quantized import QuantizedLinear

from ..close import DTYPES, exact, rounded
from ..shared.test_quantized_gemv import EIGHT, NUMBERS, packed


def nearest(x: np.ndarray) -> np.ndarray:
    """The nearest float to each number, of two the one with an even code."""
    order = NUMBERS[np.lexsort((NUMBERS & 1, EIGHT[NUMBERS]))]
    apart = np.abs(EIGHT[order] - x[..., None])
    even = apart + np.where(order & 1, 1e-12, 0)
    return EIGHT[order][even.argmin(-1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "group"), [(1, 100, 100), (9, 192, 64), (17, 384, 128), (3, 320, 320)])
def test_rounded_values_are_the_nearest_floats(
    device: torch.device, rows: int, width: int, group: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(rows, width)) * 10.0 ** rng.uniform(-3, 3, (rows, width))
    drawn[0, :group] = 0  # a group of zeros
    x = rounded(drawn, dtype, device)
    groups = exact(x).reshape(rows, -1, group)
    largest = np.abs(groups).max(2)
    scales = np.where(largest > 0, largest / 448, 1)
    want = nearest(groups / scales[..., None]).reshape(rows, width)
    for computed in (quantize_float8, partial(file.quantize_float8, kernel=False)):
        numbers, made = computed(x, group)
        np.testing.assert_allclose(exact(made), scales, rtol=1e-6)
        assert numbers.dtype == torch.float8_e4m3fn and numbers.shape == (rows, -(-width // 64) * 64)
        assert width == group or made.stride() == (1, rows)
        natural = np.zeros((rows, numbers.shape[1]))
        for byte in range(numbers.shape[1]):
            word, place = byte % 64 // 4, byte % 4
            natural[:, byte // 64 * 64 + 32 * (place % 2) + 2 * word + place // 2] = exact(numbers)[:, byte]
        assert not natural[:, width:].any()
        # Where a scale is rounded, a number between two floats may fall to either.
        same = natural[:, :width] == want
        assert same.mean() > 0.99
        assert (np.abs(natural[:, :width] - want) <= np.maximum(np.abs(want) / 8, 2.0**-9)).all()


def test_groups_that_do_not_divide_rows_are_refused(device: torch.device) -> None:
    for width, group in ((96, 32), (100, 64)):
        with pytest.raises(ValueError, match=rf"x \[2, {width}\] cannot be split into groups of {group}"):
            quantize_float8(torch.ones(2, width, device=device), group)


@pytest.mark.parametrize(("width", "group"), [(256, 128), (100, 100)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers_of_float8_activations(device: torch.device, width: int, group: int, bias: bool) -> None:
    """Of more than 64 rows x is rounded, by groups of its own; of fewer it is not."""
    rng, out = np.random.default_rng(0), 21
    module: Any = QuantizedLinear(
        width, out, bits=8, group=group, floats=True, activations=True, scales=torch.float32, bias=bias
    ).to(device)
    codes = rng.choice(NUMBERS, (out, width))
    module.codes.copy_(torch.from_numpy(packed(codes, 8)))
    scales = rng.uniform(0.5, 2, (width // group, out))
    module.scales.copy_(torch.from_numpy(scales))
    added = rng.normal(size=out) if bias else np.zeros(out)
    if bias:
        module.bias.data.copy_(torch.from_numpy(added))
    weight = scales.T.repeat(group, 1) * EIGHT[codes]
    for rows in (64, 65):
        x = torch.from_numpy(rng.normal(size=(1, rows, width))).float().to(device)
        groups = exact(x).reshape(rows, -1, group)
        steps = np.abs(groups).max(2, keepdims=True) / 448
        used = exact(x)[0] if rows == 64 else (nearest(groups / steps) * steps).reshape(rows, width)
        with torch.no_grad():
            got = exact(module(x))[0]
        want = used @ weight.T + added
        size = np.abs(used) @ np.abs(weight).T
        assert (np.abs(got - want) <= 1e-4 * size + 1e-5).all()
        assert rows == 64 or (np.abs(exact(x)[0] @ weight.T + added - got) > 1e-3 * size).any()

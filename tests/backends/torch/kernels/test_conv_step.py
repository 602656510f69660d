"""One token of the causal convolution against numpy's, and against the op's own reference."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weft.backends.torch.kernels import conv_step as kernel
from weft.ir.ops.signals import causal_conv as op

from .close import DTYPES, assert_close, exact, rounded

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def case(batch: int, channels: int, width: int, dtype: torch.dtype, device: torch.device) -> Operands:
    rng = np.random.default_rng(0)
    shapes = ((batch, channels), (channels, width), (channels,), (batch, width - 1, channels))
    x, weight, bias, past = (rounded(rng.normal(size=shape), dtype, device) for shape in shapes)
    return x, weight, bias, past


def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, past: torch.Tensor) -> NDArray[np.float64]:
    """The last output of numpy's convolution of each channel, through silu."""
    seen = np.concatenate([exact(past), exact(x)[:, None]], 1)
    y = np.empty(x.shape)
    for row, channel in np.ndindex(*x.shape):
        taps = exact(weight)[channel][::-1]
        y[row, channel] = np.convolve(seen[row, :, channel], taps, "valid")[0] + exact(bias)[channel]
    return y / (1 + np.exp(-y))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "channels", "width"), [(2, 7, 4), (1, 200, 3), (3, 130, 2)])
def test_one_token_agrees_with_float64(
    device: torch.device, batch: int, channels: int, width: int, dtype: torch.dtype
) -> None:
    x, weight, bias, past = case(batch, channels, width, dtype, device)
    assert kernel.refusal(x) is None
    kept = past.clone()
    y, present = kernel.conv_step(x, weight, bias, past)
    assert_close(y, convolved(x, weight, bias, past), terms=width)
    assert torch.equal(present, torch.cat([kept[:, 1:], x[:, None]], 1))
    assert torch.equal(past, kept)
    in_place, present = kernel.conv_step(x, weight, bias, past, past)
    assert present is past
    assert torch.equal(in_place, y)
    assert torch.equal(past, torch.cat([kept[:, 1:], x[:, None]], 1))


def test_a_slice_of_a_projection_without_bias_and_a_wide_state(device: torch.device) -> None:
    x, weight, bias, past = case(2, 9, 4, torch.bfloat16, device)
    projected = torch.cat([torch.ones_like(x), x], 1)
    y, present = kernel.conv_step(projected[:, 9:], weight, None, past.float())
    assert present.dtype == torch.float32
    assert_close(y, convolved(x, weight, torch.zeros_like(bias), past), terms=4)


@pytest.mark.parametrize("activation", ["identity", "gelu"])
def test_kernel_agrees_with_the_op(device: torch.device, activation: str) -> None:
    x, weight, bias, past = case(2, 9, 4, torch.float32, device)
    operands = exact(x)[:, None], *map(exact, (weight, bias, past))
    want, after = op.reference(*operands, activation=activation)
    for step in (kernel.conv_step, partial(kernel.conv_step, kernel=False)):
        y, present = step(x, weight, bias, past, activation=activation)
        assert_close(y, want[:, 0], terms=8)
        assert_close(present, after, terms=1)


def test_float64_falls_back_to_torch(device: torch.device) -> None:
    x, weight, bias, past = case(2, 9, 4, torch.float64, device)
    assert kernel.refusal(x) == "the kernel computes in f32"
    want = convolved(x, weight, bias, past)
    y, present = kernel.conv_step(x, weight, bias, past, past)
    assert present is past
    assert torch.equal(past[:, -1], x)
    assert_close(y, want, terms=4)


def test_operands_that_do_not_fit_are_refused(device: torch.device) -> None:
    x, weight, bias, past = case(2, 3, 4, torch.float32, device)
    for step in (kernel.conv_step, partial(kernel.conv_step, kernel=False)):
        with pytest.raises(ValueError, match=r"weight \[2, 4\] must be \[3, width\]"):
            step(x, weight[:2], bias, past)
        with pytest.raises(ValueError, match=r"past \[2, 2, 3\] must be \[2, 3, 3\]"):
            step(x, weight, bias, past[:, 1:])
        with pytest.raises(ValueError, match="activation 'soft' is not one of identity"):
            step(x, weight, bias, past, activation="soft")
    with pytest.raises(ValueError, match="past and present must be contiguous"):
        kernel.conv_step(x, weight, bias, past.mT.contiguous().mT)


def test_gradients_fall_back_to_torch(device: torch.device) -> None:
    x, weight, bias, past = case(2, 3, 4, torch.float32, device)
    weight.requires_grad_()
    assert kernel.refusal(x, weight) == "a gradient is required"
    assert kernel.conv_step(x, weight, bias, past)[0].requires_grad

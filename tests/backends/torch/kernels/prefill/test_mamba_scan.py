"""Mamba's recurrence against its unrolled sum in float64, and against the op's own reference."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weft.backends.torch.kernels.prefill import mamba_scan as kernel
from weft.backends.torch.kernels.shared.operands import contiguous_tokens
from weft.ir.ops.state_space import selective_scan as op

from ..close import DTYPES, assert_close, exact, rounded


class Case(NamedTuple):
    x: torch.Tensor
    delta: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    d: torch.Tensor | None
    past: torch.Tensor | None


def case(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, seed: int = 0, bare: bool = False
) -> Case:
    """Random operands of [batch, seq, channels] with so many states; no d and no past if bare."""
    batch, seq, channels, states = shape
    rng = np.random.default_rng(seed)
    x, b, c = (rng.normal(size=(batch, seq, n)) for n in (channels, states, states))
    delta, a = rng.uniform(0.05, 0.8, (batch, seq, channels)), -rng.uniform(0.2, 3, (channels, states))
    made = [rounded(t, dtype, device) for t in (x, delta, a, b, c)]
    d, past = rng.normal(size=channels), rng.normal(size=(batch, states, channels))
    more = [None, None] if bare else [rounded(d, dtype, device), rounded(past, torch.float32, device)]
    return Case(*made, *more)


def unrolled(case: Case) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """y_t = Σ_{s≤t} C_t·B_s e^{A (S_t − S_s)} Δ_s x_s + C_t e^{A S_t} h_0 + D x_t, S the running sum of Δ; and h."""
    x, delta, a, b, c = (exact(t) for t in case[:5])
    start = np.zeros((len(x), a.shape[1], a.shape[0])) if case.past is None else exact(case.past)
    sums = np.cumsum(delta, 1)
    y, state = np.zeros_like(x), start
    for t in range(x.shape[1]):
        gap = (sums[:, t, None] - sums[:, : t + 1])[..., None] * a  # [batch, s, channels, states]
        driven = np.exp(gap) * (delta * x)[:, : t + 1, :, None] * b[:, : t + 1, None, :]
        state = driven.sum(1).swapaxes(1, 2) + np.exp(sums[:, t, None] * a.T) * start
        y[:, t] = np.einsum("bnc,bn->bc", state, c[:, t])
    return y if case.d is None else y + exact(case.d) * x, state


SHAPES = [(2, 9, 5, 3), (1, 11, 130, 16), (1, 6, 40, 33)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "chunk"), [*zip(SHAPES, (4, 11, 5), strict=True), (SHAPES[0], 3)])
def test_scan_agrees_with_the_unrolled_sum(
    device: torch.device, shape: tuple[int, int, int, int], chunk: int, dtype: torch.dtype
) -> None:
    given = case(shape, dtype, device)
    assert kernel.refusal(given.x, given.a) is None
    found = kernel.mamba_scan(*given, chunk=chunk)
    for got, want in zip(found, unrolled(given), strict=True):
        assert_close(got, want, terms=shape[1] * shape[3])


def test_scan_without_past_state_and_skip(device: torch.device) -> None:
    given = case((2, 7, 6, 4), torch.float32, device, bare=True)
    for got, want in zip(kernel.mamba_scan(*given, chunk=3), unrolled(given), strict=True):
        assert_close(got, want, terms=28)


def test_kernel_agrees_with_the_op(device: torch.device) -> None:
    given = case((2, 7, 6, 4), torch.float32, device)
    for got, want in zip(kernel.mamba_scan(*given), op.reference(*map(exact, given)), strict=True):
        assert_close(got, want, terms=28)


def test_slices_of_a_projection_are_not_copied(device: torch.device) -> None:
    given = case((2, 5, 6, 4), torch.float32, device)
    wide = torch.cat([given.b, given.c, given.x, given.delta], -1)
    b, c, x, delta = wide.split([4, 4, 6, 6], -1)
    assert contiguous_tokens(x).data_ptr() == x.data_ptr()
    for got, want in zip(kernel.mamba_scan(x, delta, given.a, b, c, given.d, given.past), unrolled(given), strict=True):
        assert_close(got, want, terms=20)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scan_in_parts_continues_from_the_state(device: torch.device, dtype: torch.dtype) -> None:
    given = case((2, 6, 37, 5), dtype, device)
    past = given.past
    found = []
    for start, stop in ((0, 4), (4, 6)):
        x, delta, b, c = (t[:, start:stop] for t in (given.x, given.delta, given.b, given.c))
        y, past = kernel.mamba_scan(x, delta, given.a, b, c, given.d, past)
        found.append(y)
    want, state = unrolled(given)
    assert past is not None
    assert_close(torch.cat(found, 1), want, terms=30)
    assert_close(past, state, terms=30)


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_torch_fallback_agrees_with_float64(device: torch.device, dtype: torch.dtype) -> None:
    given = case((2, 9, 5, 3), dtype, device)
    for got, want in zip(kernel.mamba_scan(*given, kernel=False), unrolled(given), strict=True):
        assert_close(got, want, terms=27)


def test_unsupported_operands_fall_back_to_torch(device: torch.device) -> None:
    wide = case((1, 2, 3, 65), torch.float32, device)
    assert kernel.refusal(wide.x, wide.a) == "more than 64 states per channel"
    assert_close(kernel.mamba_scan(*wide)[0], unrolled(wide)[0], terms=130)
    double = case((1, 1, 3, 2), torch.float64, device)
    assert kernel.refusal(double.x, double.a) == "the kernel computes in f32"
    for got, want in zip(kernel.mamba_scan(*double), unrolled(double), strict=True):
        assert_close(got, want, terms=2)


def test_chunks_fill_the_device_and_have_a_least_length(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    grids = []

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append(grid)
            return lambda *args, **options: None

    for name in ("_end_kernel", "_scan_kernel"):
        monkeypatch.setattr(kernel, name, Recorded())
    for seq in (127, 128, 2048):
        x, a, b = (torch.zeros(size, device=device) for size in ((1, seq, 5120), (5120, 16), (1, seq, 16)))
        kernel.mamba_scan(x, x, a, b, b)
    assert grids == [(1, 40, 1), (1, 40, 1), (2, 40, 1), (25, 40, 1), (26, 40, 1)]


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    given = case((1, 2, 3, 4), torch.float32, device)
    for changed, words in (
        (given._replace(x=given.x[..., :2]), "do not fit a"),
        (given._replace(b=given.b[..., :2]), r"must be \[1, 2, 4\]"),
        (given._replace(past=given.a[None]), r"past \[1, 3, 4\] must be \[1, 4, 3\]"),
    ):
        for scan in (kernel.mamba_scan, partial(kernel.mamba_scan, kernel=False)):
            with pytest.raises(ValueError, match=words):
                scan(*changed)


def test_gradients_fall_back_to_torch(device: torch.device) -> None:
    given = case((1, 3, 4, 2), torch.float32, device)
    delta = given.delta.clone().requires_grad_()
    assert kernel.refusal(given.x, given.a, delta) == "a gradient is required"
    y = kernel.mamba_scan(*given._replace(delta=delta))[0]
    assert y.requires_grad
    with torch.no_grad():
        assert kernel.refusal(given.x, given.a, delta) is None

"""Mamba-2's recurrence against its unrolled sum in float64, and against the op's own reference."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weft.backends.torch.kernels.prefill import mamba2_scan as kernel
from weft.backends.torch.kernels.shared.operands import contiguous_tokens
from weft.ir.ops.state_space import ssd as op

from ..close import DTYPES, assert_close, exact, rounded


class Case(NamedTuple):
    x: torch.Tensor
    delta: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    d: torch.Tensor | None
    past: torch.Tensor | None


class Shape(NamedTuple):
    batch: int
    seq: int
    heads: int
    groups: int
    states: int
    width: int

    @property
    def split(self) -> dict[str, int]:
        return {"heads": self.heads, "groups": self.groups}


def case(shape: Shape, dtype: torch.dtype, device: torch.device, bare: bool = False) -> Case:
    """Random operands; no d and no past if bare."""
    rng = np.random.default_rng(0)
    batch, seq, heads, groups, states, width = shape
    x, b, c = (rng.normal(size=(batch, seq, n)) for n in (heads * width, groups * states, groups * states))
    delta, a = rng.uniform(0.01, 0.4, (batch, seq, heads)), -rng.uniform(0.2, 2, heads)
    made = [rounded(t, dtype, device) for t in (x, delta, a, b, c)]
    d, past = rng.normal(size=heads), rng.normal(size=(batch, heads, states, width))
    more = [None, None] if bare else [rounded(d, dtype, device), rounded(past, torch.float32, device)]
    return Case(*made, *more)


def unrolled(case: Case, shape: Shape) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """y_t = Σ_{s≤t} (C_t·B_s) e^{A (S_t − S_s)} Δ_s x_s + e^{A S_t} C_t h_0 + D x_t, S the running sum of Δ; and h."""
    batch, seq, heads, groups, states, width = shape
    x, delta, a, b, c = (exact(t) for t in case[:5])
    xh = x.reshape(batch, seq, heads, width)
    bh, ch = (t.reshape(batch, seq, groups, states).repeat(heads // groups, 2) for t in (b, c))
    start = np.zeros((batch, heads, states, width)) if case.past is None else exact(case.past)
    sums = np.cumsum(delta * a, 1)
    gap = sums[:, :, None] - sums[:, None]  # [batch, t, s, heads]
    weight = np.where(np.tri(seq, dtype=bool)[..., None], np.exp(np.minimum(gap, 0)), 0) * delta[:, None]
    y = np.einsum("bthn,bshn,btsh,bshp->bthp", ch, bh, weight, xh, optimize=True)
    y += np.exp(sums)[..., None] * np.einsum("bthn,bhnp->bthp", ch, start)
    state = np.einsum("bsh,bshn,bshp->bhnp", weight[:, -1], bh, xh)
    state += np.exp(sums[:, -1])[..., None, None] * start
    y = y if case.d is None else y + exact(case.d)[:, None] * xh
    return y.reshape(x.shape), state


SHAPES = [Shape(2, 9, 4, 2, 5, 3), Shape(1, 150, 2, 1, 16, 20), Shape(1, 323, 2, 2, 33, 16)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scan_agrees_with_the_unrolled_sum(device: torch.device, shape: Shape, dtype: torch.dtype) -> None:
    given = case(shape, dtype, device)
    assert kernel.refusal(given.x, given.b, **shape.split) is None
    found = kernel.mamba2_scan(*given, **shape.split)
    # On the way from x to y three operands of products are rounded to the dtype: errors of three y add up.
    for got, want in zip(found, unrolled(given, shape), strict=True):
        assert_close(got, want, terms=shape.seq * shape.states, inner=(3, dtype))


def test_scan_without_past_state_and_skip(device: torch.device) -> None:
    shape = Shape(2, 70, 2, 1, 4, 5)
    given = case(shape, torch.float32, device, bare=True)
    for got, want in zip(kernel.mamba2_scan(*given, **shape.split), unrolled(given, shape), strict=True):
        assert_close(got, want, terms=280)


def test_kernel_agrees_with_the_op(device: torch.device) -> None:
    given = case(SHAPES[0], torch.float32, device)
    want = op.reference(*map(exact, given), **SHAPES[0].split)
    for got, wanted in zip(kernel.mamba2_scan(*given, **SHAPES[0].split), want, strict=True):
        assert_close(got, wanted, terms=45)


def test_slices_of_a_projection_are_not_copied(device: torch.device) -> None:
    shape = SHAPES[0]
    given = case(shape, torch.float32, device)
    parts = [given.x, given.b, given.c, given.delta]
    x, b, c, delta = torch.cat(parts, -1).split([t.shape[-1] for t in parts], -1)
    assert contiguous_tokens(x).data_ptr() == x.data_ptr()
    found = kernel.mamba2_scan(x, delta, given.a, b, c, given.d, given.past, **shape.split)
    for got, want in zip(found, unrolled(given, shape), strict=True):
        assert_close(got, want, terms=45)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scan_in_parts_continues_from_the_state(device: torch.device, dtype: torch.dtype) -> None:
    shape = Shape(2, 71, 4, 2, 24, 40)
    given = case(shape, dtype, device)
    past, found = given.past, []
    for start, stop in ((0, 66), (66, 71)):
        x, delta, b, c = (t[:, start:stop] for t in (given.x, given.delta, given.b, given.c))
        y, past = kernel.mamba2_scan(x, delta, given.a, b, c, given.d, past, **shape.split)
        found.append(y)
    want, state = unrolled(given, shape)
    assert past is not None
    assert_close(torch.cat(found, 1), want, terms=71 * 24, inner=(3, dtype))
    assert_close(past, state, terms=71 * 24, inner=(3, dtype))


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_torch_fallback_agrees_with_float64(device: torch.device, dtype: torch.dtype) -> None:
    given = case(SHAPES[0], dtype, device)
    for got, want in zip(
        kernel.mamba2_scan(*given, **SHAPES[0].split, kernel=False), unrolled(given, SHAPES[0]), strict=True
    ):
        assert_close(got, want, terms=45)


def test_unsupported_operands_fall_back_to_torch(device: torch.device) -> None:
    shape = Shape(1, 2, 1, 1, 257, 3)
    given = case(shape, torch.float32, device)
    reason = "a state [257, 3] is larger than [256, 128]"
    assert kernel.refusal(given.x, given.b, **shape.split) == reason
    assert_close(kernel.mamba2_scan(*given, **shape.split)[0], unrolled(given, shape)[0], terms=514)
    shape = Shape(1, 1, 2, 1, 2, 3)
    given = case(shape, torch.float64, device)
    assert kernel.refusal(given.x, given.b, **shape.split) == "the kernel computes in f32"
    for got, want in zip(kernel.mamba2_scan(*given, **shape.split), unrolled(given, shape), strict=True):
        assert_close(got, want, terms=2)


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    given = case(Shape(1, 2, 2, 1, 4, 3), torch.float32, device)
    for changed, heads, words in (
        (given, 4, "cannot be split into 4 heads"),
        (given._replace(delta=given.delta[..., :1]), 2, "do not fit 2 heads"),
        (given._replace(b=given.b[:, :1]), 2, "do not fit x"),
        (given._replace(past=torch.zeros(1, 2, 3, 4, device=device)), 2, r"must be \[1, 2, 4, 3\]"),
    ):
        for scan in (kernel.mamba2_scan, partial(kernel.mamba2_scan, kernel=False)):
            with pytest.raises(ValueError, match=words):
                scan(*changed, heads=heads)


def test_gradients_fall_back_to_torch(device: torch.device) -> None:
    shape = Shape(1, 3, 2, 1, 4, 3)
    given = case(shape, torch.float32, device)
    delta = given.delta.clone().requires_grad_()
    assert kernel.refusal(given.x, given.b, delta, **shape.split) == "a gradient is required"
    y = kernel.mamba2_scan(*given._replace(delta=delta), **shape.split)[0]
    assert y.requires_grad
    with torch.no_grad():
        assert kernel.refusal(given.x, given.b, delta, **shape.split) is None

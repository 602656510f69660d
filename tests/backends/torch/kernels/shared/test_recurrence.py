"""Helpers of the kernels of recurrences."""

from __future__ import annotations

import math

import pytest
import torch

from weft.backends.torch.kernels.shared.launch import jit, tl
from weft.backends.torch.kernels.shared.recurrence import (
    decay_rates,
    silu_gated,
    softplus,
    step_in_place,
    store_normed,
    update_state,
)


@jit
def softplus_kernel(x, y):
    at = tl.arange(0, 16)
    tl.store(y + at, softplus(tl.load(x + at)))


@jit
def state_kernel(state, power, into, driven, out, present, y):
    n, p = tl.arange(0, 4), tl.arange(0, 2)
    at = n[:, None] * 2 + p[None, :]
    before = tl.load(state + at)
    made = update_state(
        before, tl.load(power + n)[:, None], tl.load(into + n), 0.5, tl.load(driven + p), tl.load(out + n), 3.0,
        present, at, (n < 3)[:, None] & (p < 2)[None, :],
    )  # fmt: skip
    tl.store(y + p, made)


@jit
def norm_kernel(raw, gain, gate, y, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    store_normed(raw, gain, gate, y, eps, SIZE, BLOCK)


@jit
def gate_kernel(x, gate, y):
    at = tl.arange(0, 4)
    tl.store(y + at, silu_gated(tl.load(x + at), gate, at, at < 3), mask=at < 3)


def test_softplus_is_precise_for_small_results(device: torch.device) -> None:
    x = torch.tensor([-80.0, -40, -20, -10, -5, -2, -1, -0.1, 0, 0.1, 1, 2, 5, 10, 20, 80], device=device)
    y = torch.empty_like(x)
    softplus_kernel[(1,)](x, y)
    wanted = [math.log1p(math.exp(v)) if v < 40 else v for v in x.double().tolist()]
    torch.testing.assert_close(y.double().cpu(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_state_decays_and_takes_an_outer_product(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    state, into, driven, out = (torch.randn(*s, generator=generator) for s in ((4, 2), (4,), (2,), (4,)))
    power = torch.tensor([0.0, -1.0, -2.0, -3.0])
    present, y = torch.full((4, 2), 9.0, device=device), torch.empty(2, device=device)
    state_kernel[(1,)](*(t.to(device) for t in (state, power, into, driven, out)), present, y)
    after = 2 ** power[:, None] * state + into[:, None] * 0.5 * driven
    torch.testing.assert_close(present[:3].cpu(), after[:3])
    assert present[3].tolist() == [9, 9]  # masked
    torch.testing.assert_close(y.cpu(), out @ after + 3 * driven)


@pytest.mark.parametrize("block", [4, 8])
def test_a_norm_is_computed_in_blocks_with_gain_and_gate(device: torch.device, block: int) -> None:
    raw, gain, gate = (torch.randn(6, generator=torch.Generator().manual_seed(i)).to(device) for i in range(3))
    y = torch.empty(6, device=device)
    norm_kernel[(1,)](raw, gain, gate, y, 0.1, SIZE=6, BLOCK=block)
    normed = raw / (raw.square().mean() + 0.1).sqrt()
    torch.testing.assert_close(y, normed * gain * gate)
    norm_kernel[(1,)](raw, None, None, y, 0.1, SIZE=6, BLOCK=block)
    torch.testing.assert_close(y, normed)


def test_silu_gates_are_optional(device: torch.device) -> None:
    x, gate = torch.tensor([1.0, 2, 3, 4], device=device), torch.tensor([0.0, -1, 2, 5], device=device)
    y = torch.full_like(x, 7)
    gate_kernel[(1,)](x, gate, y)
    torch.testing.assert_close(y[:3], (x * torch.nn.functional.silu(gate))[:3])
    assert y[3] == 7
    gate_kernel[(1,)](x, None, y)
    assert y.tolist() == [1, 2, 3, 7]


def test_decay_rates_are_negative() -> None:
    torch.testing.assert_close(decay_rates(torch.tensor([0.0, math.log(3)])), torch.tensor([-1.0, -3.0]))


def test_a_step_without_a_kernel_updates_states_in_place() -> None:
    state, token = torch.ones(2, 3), torch.arange(3.0).view(1, 1, 3)
    sizes = {"outputs": ((3,),), "count": 3, "block": 4}
    y = step_in_place(None, lambda h, x: (h + x, 2 * h), (state,), (token,), **sizes, kernel=False)
    assert state.tolist() == [[1, 2, 3]] * 2
    assert isinstance(y, torch.Tensor) and y.tolist() == [[[2, 2, 2]]] * 2
    with pytest.raises(ValueError, match="the states of a recurrence must be contiguous"):
        step_in_place(None, lambda h, x: (h, x), (state.T,), (token,), **sizes)

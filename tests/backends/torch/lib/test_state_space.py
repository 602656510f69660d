"""The recurrences of Mamba and Mamba-2 in torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from weft.backends.torch.lib.state_space import run_mamba, run_mamba2, selective_scan, ssd
from weft.ir import lookup
from weft.ir.op import Case, Op, case, normal

from .part_calls import check, examples


@pytest.mark.parametrize(("op", "example", "dtype"), examples("selective_scan", "ssd"))
def test_cases_agree_with_the_reference(op: Op, example: Case, dtype: torch.dtype) -> None:
    check(op, example, dtype)


@pytest.mark.parametrize("steep", [0.01, 1.0, 1e4])
def test_selective_scan_with_step_sizes_of_many_magnitudes(steep: float, rng: np.random.Generator) -> None:
    rates = -np.exp(rng.uniform(-3, 3, (5, 4)))
    delta = np.exp(rng.uniform(-8, 0, (2, 130, 5))) * np.where(rng.random((2, 130, 5)) < 0.2, steep, 0.1)
    operands = normal(2, 130, 5), delta, rates, normal(2, 130, 4), normal(2, 130, 4), normal(5), normal(2, 4, 5)
    check(lookup("selective_scan"), case(*operands), torch.float32)


def test_selective_scan_of_two_tokens_by_hand() -> None:
    """h = e^{ΔA} h + Δ B x with A = −ln 2: 3, then 3/2 + 4; y = C h + D x."""
    x, delta, b, c = (torch.tensor([[[float(n)], [float(m)]]]) for n, m in ((3, 4), (1, 1), (1, 1), (1, 10)))
    a, d = torch.full((1, 1), -math.log(2)), torch.tensor([0.5])
    y, state = selective_scan(x, delta, a, b, c, d)
    torch.testing.assert_close(y.flatten(), torch.tensor([4.5, 57.0]))
    torch.testing.assert_close(state.flatten(), torch.tensor([5.5]))


def test_ssd_is_selective_scan_with_one_rate_per_head() -> None:
    generator = torch.Generator().manual_seed(3)
    x, b, c = (torch.randn(1, 5, n, generator=generator, dtype=torch.float64) for n in (4, 3, 3))
    delta = torch.rand(1, 5, 2, generator=generator, dtype=torch.float64)
    a, d = -torch.rand(2, generator=generator, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    y, state = ssd(x, delta, a, b, c, d, heads=2, groups=1)
    steps, rates = delta.repeat_interleave(2, 2), a.repeat_interleave(2)[:, None].expand(4, 3)
    wanted, final = selective_scan(x, steps, rates, b, c, d.repeat_interleave(2))
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(state, final.unflatten(2, (2, 2)).transpose(1, 2))


def test_cpu_runs_the_recurrences_in_torch() -> None:
    x, delta, b = torch.ones(1, 2, 2), torch.ones(1, 2, 2), torch.ones(1, 2, 3)
    operands = x, delta, -torch.ones(2, 3), b, b
    torch.testing.assert_close(run_mamba(*operands), selective_scan(*operands))
    heads = x, delta, -torch.ones(2), b, b
    torch.testing.assert_close(run_mamba2(*heads, heads=2, groups=1), ssd(*heads, heads=2, groups=1))

"""Training of students: the divergence and its gradient, the step size, and the order of batches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from weft.backends.torch.distillation.training import (
    Outcome,
    _compute_rms,
    _draw_batches,
    _schedule_rate,
    sum_divergence,
)


def test_divergence_and_its_gradient_equal_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(2, 300, 11, generator=generator) for _ in range(2))  # more rows than one block
    student.requires_grad_(True)
    found = sum_divergence(student, teacher)
    (gradient,) = torch.autograd.grad(found, student)
    exact = student.detach().double().requires_grad_(True)
    p, log_q = teacher.double().log_softmax(-1), exact.log_softmax(-1)
    wanted = torch.nn.functional.kl_div(log_q, p, log_target=True, reduction="sum")
    (expected,) = torch.autograd.grad(wanted, exact)
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=1e-6)


def test_step_size_warms_up_and_decays_along_a_cosine() -> None:
    assert _schedule_rate(0) == pytest.approx(0.2)
    assert _schedule_rate(0.5) == pytest.approx(0.5)
    assert _schedule_rate(0.25) == pytest.approx(0.5 * (1 + math.sqrt(0.5)))
    assert _schedule_rate(1) == pytest.approx(0)
    rates = [_schedule_rate(i / 100) for i in range(101)]
    assert max(rates) == rates[4] and rates[4:] == sorted(rates[4:], reverse=True)


def test_each_window_is_drawn_once_before_any_again() -> None:
    windows = torch.arange(6)[:, None].repeat(1, 3)
    drawn = [batch[:, 0].tolist() for batch in itertools.islice(_draw_batches(windows, 2, seed=1), 6)]
    assert sorted(itertools.chain(*drawn[:3])) == sorted(itertools.chain(*drawn[3:])) == [0, 1, 2, 3, 4, 5]
    again = [batch[:, 0].tolist() for batch in itertools.islice(_draw_batches(windows, 2, seed=1), 6)]
    assert drawn == again
    assert len(next(_draw_batches(windows, 99, seed=1))) == 6  # of a larger batch than windows


def test_root_mean_square_has_a_lower_bound() -> None:
    assert _compute_rms(torch.tensor([3.0, -4.0])) == pytest.approx(math.sqrt(12.5))
    assert _compute_rms(torch.zeros(3)) == 1e-2


def test_nan_is_no_improvement() -> None:
    assert Outcome(2.0, 1.0, 5).improved
    assert not Outcome(1.0, 1.0, 5).improved and not Outcome(1.0, math.nan, 5).improved

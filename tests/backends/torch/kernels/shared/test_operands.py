"""Operands of kernel launchers: reasons to fall back, checks, memory layout."""

from __future__ import annotations

import pytest
import torch

from weft.backends.torch.kernels.shared import launch, operands
from weft.backends.torch.kernels.shared.operands import (
    check_step,
    contiguous,
    contiguous_rows,
    contiguous_tokens,
    power_of_2,
    requires_grad,
    row_stride,
)


def test_gradients_are_wanted_where_autograd_records_them() -> None:
    leaf = torch.zeros(1, requires_grad=True)
    assert requires_grad(None, leaf) and not requires_grad(None, leaf.detach())
    with torch.no_grad():
        assert not requires_grad(leaf)


def test_kernels_refuse_float64_gradients_and_devices(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    x = torch.zeros(1, device=device)
    assert operands.refusal(x, None) is None
    assert operands.refusal(x, x.double()) == "the kernel computes in f32"
    assert operands.refusal(x, x.clone().requires_grad_()) == "a gradient is required"
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert operands.refusal(torch.zeros(1)) == "Triton does not run on cpu"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"present": torch.zeros(2, 4)}, r"present \[2, 4\] must have the shape of past \[2, 3\]"),
        ({"past": torch.zeros(3, 2).T}, "past and present must be contiguous"),
        ({"present": torch.zeros(3, 2).T}, "past and present must be contiguous"),
        ({"bias": torch.zeros(5)}, r"bias \[5\] is not \[6\]"),
        ({"gate": torch.zeros(2, 7)}, r"gate \[2, 7\] must have the shape of x \[2, 6\]"),
    ],
)
def test_operands_of_a_step_that_do_not_fit_are_refused(changed: dict[str, torch.Tensor], message: str) -> None:
    x, past = torch.zeros(2, 6), torch.zeros(2, 3)
    given = {"x": x, "past": past, "present": None, "width": 6, "bias": torch.zeros(6), "gate": x}
    check_step(**given)
    with pytest.raises(ValueError, match=message):
        check_step(**{**given, **changed})


def test_a_slice_of_a_projection_is_not_copied() -> None:
    wide = torch.arange(24.0).view(2, 3, 4)
    part = wide[..., 1:3]
    assert contiguous_tokens(part) is part
    turned = wide.transpose(0, 1)
    assert contiguous_tokens(turned).is_contiguous() and torch.equal(contiguous_tokens(turned), turned)
    rows = wide[0, :, 1:]
    assert contiguous_rows(rows) is rows and row_stride(rows) == 4
    assert contiguous_rows(rows.T).stride() == (3, 1)


def test_operands_that_are_left_out_stay_so() -> None:
    assert (contiguous_rows(None), contiguous(None), row_stride(None)) == (None, None, 0)
    assert contiguous(torch.zeros(2, 3).T).is_contiguous()


def test_power_of_2_rounds_up() -> None:
    assert [power_of_2(n) for n in (0, 1, 2, 3, 8, 9)] == [1, 1, 2, 4, 8, 16]
    assert power_of_2(3, 16) == 16

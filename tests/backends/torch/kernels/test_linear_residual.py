"""residual + s·norm(x Wᵀ + b) against float64, with columns that are split and with norms that need all outputs."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from weft.backends.torch.kernels import linear_residual as module
from weft.backends.torch.kernels.linear_residual import linear_residual, split_columns
from weft.backends.torch.kernels.shared import gemv
from weft.backends.torch.kernels.shared.norm import Norm

from .oracles import assert_near, draw, make_norm, norm64

reference = partial(linear_residual, kernel=False)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype", "splits", "biased"),
    [
        (1, 6, 576, BF16, 1, False),
        (1, 6, 4200, BF16, 3, True),
        (3, 5, 1601, FP16, 7, True),
        (8, 3, 1030, FP32, 33, False),
        (17, 70, 520, BF16, 5, True),
        (64, 33, 300, FP16, 3, False),
    ],
)
@pytest.mark.parametrize("kind", ["none", "rms", "layer"])
def test_agrees_with_float64(
    device: torch.device, rows: int, outputs: int, inputs: int, dtype: torch.dtype, splits: int, biased: bool, kind: str
) -> None:
    assert split_columns(outputs, inputs, gemv.choose_tile(rows, outputs, inputs, dtype))[0] == splits
    x = draw(rows, inputs, seed=1, dtype=dtype, device=device)
    weight = draw(outputs, inputs, seed=2, dtype=dtype, device=device, scale=inputs**-0.5)
    residual = draw(rows, outputs, seed=6, dtype=dtype, device=device)
    bias = draw(outputs, seed=5, dtype=dtype, device=device) if biased else None
    norm, scale = make_norm(kind, outputs, dtype, device), 0.7
    assert gemv.refusal(x, weight, residual, bias, norm.gain, norm.shift) is None
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    exact = residual.double() + scale * norm64(product, norm)
    size = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    if kind != "none":  # an error of any output moves what all are divided by
        centred = product - product.mean(-1, keepdim=True) if kind == "layer" else product
        deviation = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        size = 4 * (1 + (centred / deviation).abs().amax(-1, keepdim=True)) * size.amax(-1, keepdim=True) / deviation
        size = size * (1 if norm.gain is None else norm.gain.double().abs() + 1)
    size = size + residual.double().abs() + 1
    found = linear_residual(x, weight, residual, bias, scale=scale, norm=norm)
    assert found.dtype == dtype
    assert_near(found, exact, size, inputs)
    assert_near(reference(x, weight, residual, bias, scale=scale, norm=norm), exact, size, inputs, inner=dtype)


@pytest.mark.parametrize("kind", ["none", "rms"])
def test_ticket_counters_are_reset_and_results_repeat(device: torch.device, kind: str) -> None:
    x, residual = draw(1, 4200, seed=1, dtype=BF16, device=device), draw(1, 6, seed=2, dtype=BF16, device=device)
    weight, norm = draw(6, 4200, seed=3, dtype=BF16, device=device), make_norm(kind, 6, BF16, device)
    tickets = torch.zeros(6, dtype=torch.int32, device=device)
    first = linear_residual(x, weight, residual, norm=norm, tickets=tickets)
    assert not tickets.any()
    assert torch.equal(first, linear_residual(x, weight, residual, norm=norm, tickets=tickets))
    assert torch.equal(first, linear_residual(x, weight, residual, norm=norm))


def test_norms_over_more_outputs_than_a_block_holds(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "outputs_per_step", lambda outputs, plan: 4)
    x, residual = draw(2, 20, seed=1, dtype=FP32, device=device), draw(2, 11, seed=2, dtype=FP32, device=device)
    weight = draw(11, 20, seed=3, dtype=FP32, device=device)
    for kind in ("rms", "layer"):
        norm = make_norm(kind, 11, FP32, device)
        exact = residual.double() + norm64(x.double() @ weight.double().T, norm)
        assert_near(linear_residual(x, weight, residual, norm=norm), exact, torch.full_like(exact, 30), 20)


def test_columns_are_split_where_rows_do_not_fill_the_gpu() -> None:
    for outputs, inputs, splits in ((4096, 14336, 1), (576, 1536, 1), (256, 4096, 1), (256, 7168, 2), (64, 14336, 4)):
        plan = gemv.choose_tile(1, outputs, inputs, BF16)
        found, each = split_columns(outputs, inputs, plan)
        assert found == splits
        assert each % plan.columns == 0 and (found - 1) * each < inputs <= found * each


def test_leading_axes_are_kept(device: torch.device) -> None:
    x, weight = draw(2, 1, 40, seed=1, dtype=FP32, device=device), draw(6, 40, seed=2, dtype=FP32, device=device)
    residual = draw(2, 1, 6, seed=3, dtype=FP32, device=device)
    flat = linear_residual(x[:, 0], weight, residual[:, 0])
    assert torch.equal(linear_residual(x, weight, residual), flat[:, None])


def test_operands_that_do_not_fit_are_refused() -> None:
    x, weight, residual = torch.zeros(1, 6), torch.zeros(4, 6), torch.zeros(1, 4)
    with pytest.raises(ValueError, match=r"residual \[1, 3\] does not fit x \[1, 6\] Wᵀ, 4 wide"):
        linear_residual(x, weight, residual[:, :3])
    with pytest.raises(ValueError, match=r"gain \[6\] of the norm is not \[4\]"):
        linear_residual(x, weight, residual, norm=Norm("rms", torch.zeros(6)))

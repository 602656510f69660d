"""act(norm(x) W_gateᵀ) ⊙ norm(x) W_upᵀ against float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from weft.backends.torch.kernels.norm_glu import norm_glu
from weft.backends.torch.kernels.shared import gemv
from weft.backends.torch.kernels.shared.activation import ACTIVATIONS

from .oracles import FORMULAS, assert_near, draw, make_norm, norm64

reference = partial(norm_glu, kernel=False)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEEPEST = 2.0  # |act(a) − act(b)| ≤ 2 |a − b| for all but relu2


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(
    ("rows", "hidden", "inputs", "dtype", "kind", "activation", "biased"),
    [
        (1, 5, 576, BF16, "rms", "silu", False),
        (3, 7, 201, FP16, "layer", "gelu_tanh", True),
        (8, 3, 130, FP32, "rms", "gelu", True),
        (2, 9, 33, FP32, "none", "relu", False),
        (4, 19, 300, BF16, "rms", "silu", True),
        (16, 40, 130, FP16, "none", "gelu_quick", False),
        (64, 21, 150, BF16, "layer", "silu", True),
    ],
)
def test_agrees_with_float64(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    few: bool,
    rows: int,
    hidden: int,
    inputs: int,
    dtype: torch.dtype,
    kind: str,
    activation: str,
    biased: bool,
) -> None:
    if not few:
        monkeypatch.setattr(gemv, "PROCESSORS", 1)  # so that blocks take as many rows as they do of large weights
    x = draw(rows, inputs, seed=1, dtype=dtype, device=device) + 1
    weight = draw(2 * hidden, inputs, seed=2, dtype=dtype, device=device, scale=inputs**-0.5)
    bias = draw(2 * hidden, seed=5, dtype=dtype, device=device) if biased else None
    norm = make_norm(kind, inputs, dtype, device)
    assert gemv.refusal(x, weight, norm.gain, norm.shift, bias) is None
    normed, offset = norm64(x, norm), 0 if bias is None else bias.double()
    gate, up = (normed @ weight.double().T + offset).chunk(2, -1)
    gate_size, up_size = ((normed.abs() + 1) @ weight.double().abs().T + 1 + abs(offset)).chunk(2, -1)
    exact = FORMULAS[activation](gate) * up
    size = STEEPEST * 2 * gate_size * up_size
    found = norm_glu(x, weight, bias, norm=norm, activation=activation)
    assert found.dtype == dtype
    assert_near(found, exact, size, inputs, inner=FP32 if rows < gemv.DOT_ROWS else dtype)
    assert_near(reference(x, weight, bias, norm=norm, activation=activation), exact, size, inputs, inner=dtype)


@pytest.mark.parametrize(("rows", "hidden", "inputs", "dtype"), [(1, 7, 201, BF16), (2, 5, 64, FP16), (3, 9, 33, FP32)])
@pytest.mark.parametrize(("limit", "shift"), [(3.0, 1.0), (0.5, 0.0), (None, -0.25)])
def test_limits_and_shifts(
    device: torch.device, rows: int, hidden: int, inputs: int, dtype: torch.dtype, limit: float | None, shift: float
) -> None:
    x = draw(rows, inputs, seed=1, dtype=dtype, device=device)
    weight = draw(2 * hidden, inputs, seed=2, dtype=dtype, device=device, scale=6 * inputs**-0.5)
    bias = draw(2 * hidden, seed=5, dtype=dtype, device=device)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, -1)
    gate_size, up_size = (x.double().abs() @ weight.double().abs().T + bias.double().abs() + 1).chunk(2, -1)
    low, high = (-math.inf, math.inf) if limit is None else (-limit, limit)
    assert limit is None or (gate.max() > limit > gate.min() and up.min() < -limit < limit < up.max())
    exact = FORMULAS["gelu_quick"](gate.clamp(max=high)) * (up.clamp(low, high) + shift)
    size = STEEPEST * 2 * gate_size * up_size
    found = norm_glu(x, weight, bias, activation="gelu_quick", limit=limit, shift=shift)
    assert_near(found, exact, size, inputs)
    also = reference(x, weight, bias, activation="gelu_quick", limit=limit, shift=shift)
    assert_near(also, exact, size, inputs, inner=dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(device: torch.device, activation: str) -> None:
    x = torch.linspace(-5, 5, 8, device=device)[:, None]
    weight = torch.tensor([[1.0], [0.5]], device=device)
    exact = FORMULAS[activation](x.double()) * x.double() * 0.5
    assert_near(norm_glu(x, weight, activation=activation), exact, x.double().abs() ** 3 + 1, 4)


def test_leading_axes_are_kept(device: torch.device) -> None:
    x, weight = draw(2, 1, 40, seed=1, dtype=FP32, device=device), draw(6, 40, seed=2, dtype=FP32, device=device)
    assert torch.equal(norm_glu(x, weight), norm_glu(x[:, 0], weight)[:, None])


def test_operands_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(1, 6)
    with pytest.raises(ValueError, match=r"weight \[3, 6\] has an odd number of rows"):
        norm_glu(x, torch.zeros(3, 6))
    with pytest.raises(ValueError, match="activation 'swoosh' is not one of identity, silu"):
        norm_glu(x, torch.zeros(4, 6), activation="swoosh")
    with pytest.raises(ValueError, match=r"bias \[2\] does not fit weight \[4, 6\]"):
        norm_glu(x, torch.zeros(4, 6), torch.zeros(2))

"""act(norm(x) Wᵀ + b) against float64: dtypes, norms, activations, rows and sizes that fit no block."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from weft.backends.torch.kernels import norm_linear as module
from weft.backends.torch.kernels.norm_linear import norm_linear
from weft.backends.torch.kernels.shared import gemv
from weft.backends.torch.kernels.shared.activation import ACTIVATIONS
from weft.backends.torch.kernels.shared.norm import Norm

from ....sampling import each
from .oracles import FORMULAS, assert_near, draw, make_norm, norm64

reference = partial(norm_linear, kernel=False)

DTYPES = BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS = (1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype", "kind", "biased"),
    [
        (1, 7, 576, BF16, "rms", False),
        (1, 5, 1100, BF16, "none", True),
        (3, 6, 301, FP16, "layer", True),
        (8, 3, 130, FP32, "rms", True),
        (2, 9, 64, FP32, "layer", False),
        (5, 4, 1, FP32, "none", False),
    ],
)
def test_agrees_with_float64(
    device: torch.device, rows: int, outputs: int, inputs: int, dtype: torch.dtype, kind: str, biased: bool
) -> None:
    x = draw(rows, inputs, seed=1, dtype=dtype, device=device) + 1
    weight = draw(outputs, inputs, seed=2, dtype=dtype, device=device)
    bias = draw(outputs, seed=5, dtype=dtype, device=device) if biased else None
    norm = make_norm(kind, inputs, dtype, device)
    assert gemv.refusal(x, weight, norm.gain, norm.shift, bias) is None
    normed, offset = norm64(x, norm), 0 if bias is None else bias.double()
    exact = normed @ weight.double().T + offset
    size = (normed.abs() + 1) @ weight.double().abs().T + 1
    found = norm_linear(x, weight, bias, norm=norm)
    assert found.dtype == dtype
    assert_near(found, exact, size, inputs)
    assert_near(reference(x, weight, bias, norm=norm), exact, size, inputs, inner=dtype)


@pytest.mark.parametrize(("rows", "dtype", "kind"), each(4, itertools.product(ROWS, DTYPES, ("none", "rms", "layer"))))
def test_any_number_of_rows(device: torch.device, rows: int, dtype: torch.dtype, kind: str) -> None:
    """On both kinds of cores, with more steps than one and sizes that fit no block."""
    outputs, inputs = 37, 300
    x = draw(rows, inputs, seed=1, dtype=dtype, device=device) + 1
    weight, norm = draw(outputs, inputs, seed=2, dtype=dtype, device=device), make_norm(kind, inputs, dtype, device)
    assert (gemv.choose_tile(rows, outputs, inputs, dtype).stages > 0) == (rows >= gemv.DOT_ROWS)
    normed = norm64(x, norm)
    exact, size = normed @ weight.double().T, (normed.abs() + 1) @ weight.double().abs().T
    assert_near(norm_linear(x, weight, norm=norm, kernel=True), exact, size, inputs, inner=dtype)


def test_blocks_of_many_rows_agree(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows of W per block, as in a head, and a last block that has fewer."""
    monkeypatch.setattr(gemv, "PROCESSORS", 1)
    x, weight = (draw(n, 80, seed=n, dtype=BF16, device=device) for n in (2, 131))
    assert gemv.choose_tile(2, 131, 80, BF16).rows == 8
    exact = x.double() @ weight.double().T
    found, size = norm_linear(x, weight, kernel=True), x.double().abs() @ weight.double().abs().T
    assert_near(found, exact, size, 80, inner=BF16)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(device: torch.device, name: str) -> None:
    assert {*ACTIVATIONS} == {*FORMULAS}
    x = torch.linspace(-9, 9, 8, device=device)[:, None]
    weight = torch.tensor([[1.0], [0.1]], device=device)
    product = x.double() @ weight.double().T
    exact, size = FORMULAS[name](product), product.abs() ** (2 if name == "relu2" else 1) + 1
    assert_near(norm_linear(x, weight, activation=name), exact, size, 4)
    assert_near(reference(x, weight, activation=name), exact, size, 4)


def test_leading_axes_stay_and_strides_may_be_any(device: torch.device) -> None:
    x = draw(2, 3, 40, seed=1, dtype=FP32, device=device)
    weight = draw(3, 40, seed=2, dtype=FP32, device=device)
    last = x[:, -1:]
    exact = last.double() @ weight.double().T
    assert_near(norm_linear(last, weight), exact, last.double().abs() @ weight.double().abs().T, 40)


def test_slices_of_wider_rows_are_not_copied(device: torch.device) -> None:
    wide = draw(3, 1, 50, seed=1, dtype=FP32, device=device)
    part, weight = wide[..., 7:40], draw(5, 33, seed=2, dtype=FP32, device=device)
    assert gemv.flatten_rows(part).data_ptr() == part.data_ptr()
    assert gemv.flatten_rows(part.mT.contiguous().mT).is_contiguous()
    norm = make_norm("rms", 33, FP32, device)
    normed = norm64(part, norm)
    exact, size = normed @ weight.double().T, normed.abs() @ weight.double().abs().T
    assert_near(norm_linear(part, weight, norm=norm, kernel=True), exact, size, 33)


def test_unsupported_operands_fall_back_to_torch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "norm_linear_kernel", None)  # not to be launched
    x, weight = (draw(n, 16, seed=n, dtype=FP32, device=device) for n in (65, 4))
    refused = [
        (x, weight, "not 1 to 64 rows"),
        (x[:1].double(), weight.double(), "torch.float64 is not one of bf16, fp16, fp32"),
        (x[:1], weight.clone().requires_grad_(), "a gradient is required"),
        (x[:1], weight.T.contiguous().T, "an operand is not contiguous"),
    ]
    for given, w, reason in refused:
        assert gemv.refusal(given, w) == reason
        assert_near(norm_linear(given, w).detach(), (given.double() @ w.double().T).detach(), torch.full((), 40.0), 16)
    assert gemv.refusal(x[:0], weight) == "not 1 to 64 rows"
    assert norm_linear(x[:0], weight).shape == (0, 4)
    assert gemv.refusal(x[:1], weight.bfloat16()) == "an operand differs in dtype from x (torch.float32)"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": torch.zeros(4, 5)}, r"x \[1, 6\] does not fit weight \[4, 5\]"),
        ({"bias": torch.zeros(5)}, r"bias \[5\] does not fit weight \[4, 6\]"),
        ({"activation": "swoosh"}, "activation 'swoosh' is not one of identity, silu"),
        ({"norm": Norm("batch")}, "norm kind 'batch' is not one of none, rms, layer"),
        ({"norm": Norm("rms", shift=torch.zeros(6))}, "a norm of kind 'rms' has no shift"),
        ({"norm": Norm("none", gain=torch.zeros(6))}, "a norm of kind 'none' has no gain"),
        ({"norm": Norm("rms", gain=torch.zeros(5))}, r"gain \[5\] of the norm is not \[6\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changed: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"x": torch.zeros(1, 6), "weight": torch.zeros(4, 6), "bias": None} | changed
    with pytest.raises(ValueError, match=message):
        norm_linear(**given)  # type: ignore[arg-type]  # a dict of arguments, wrong on purpose

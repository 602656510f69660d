"""Linear layers in a decode step, fused with norms, gates and residual adds."""

from __future__ import annotations

import pytest
import torch

from weft.backends.torch.decode.ops.step_linear import find_kernel_activation, refuse_gemv
from weft.backends.torch.kernels.shared import launch

from ..fused_ops import KERNELS, cases_of, check, write_statements


@pytest.mark.parametrize("name", cases_of("step_linear"))
def test_torch_computes_the_cases_of_ops(name: str) -> None:
    check(name, kernel=False)


@KERNELS
@pytest.mark.usefixtures("few_processors")
@pytest.mark.parametrize("name", cases_of("step_linear"))
def test_kernels_compute_the_cases_of_ops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)
    check(name, kernel=True)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("norm_linear-0", "norm_linear({0}, {1}, bias={2}, norm={3})"),
        ("norm_linear-1", "norm_linear({0}, {1}, norm={2}, activation='gelu')"),
        ("norm_glu-0", "norm_glu({0}, {1}, norm={2})"),  # silu is the default
        ("norm_glu-2", "norm_glu({0}, {1}, activation='gelu_quick', limit=0.7, shift=1.0)"),
        ("linear_residual-1", "linear_residual({0}, {1}, {2}, bias={3}, norm={4}, scale=0.5, tickets={5})"),
    ],
)
def test_linear_layers_are_one_call_with_their_norm_and_activation(name: str, call: str) -> None:
    assert write_statements(name).endswith(f"\n{call}")


def test_activations_have_the_names_of_kernels() -> None:
    names = ["silu", "swish(1.0)", "swish(1.702)", "swish(2.0)", "snake", None]
    assert [find_kernel_activation(name) for name in names] == ["silu", "silu", "gelu_quick", None, None, None]


def test_kernels_multiply_weights_of_half_and_single_precision() -> None:
    with launch.assume_capability((9, 0)):
        assert [refuse_gemv(dtype) is None for dtype in (torch.bfloat16, torch.float32, torch.float64)] == [
            *(True, True, False)
        ]
        assert refuse_gemv(torch.float64) == "torch.float64 is not one of bf16, fp16, fp32"

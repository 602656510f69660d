"""The norm that is fused into kernels, in torch."""

from __future__ import annotations

import pytest
import torch

from weft.backends.torch.kernels.shared.norm import KINDS, NO_NORM, Norm

from ..oracles import make_norm, norm64


@pytest.mark.parametrize("kind", KINDS)
def test_norms_agree_with_the_formulas(kind: str) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norm = make_norm(kind, 8, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(norm(x), norm64(x, norm))
    norm.check(8)


def test_no_norm_returns_its_operand() -> None:
    x = torch.ones(2)
    assert NO_NORM(x) is x


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (Norm("group"), "norm kind 'group' is not one of none, rms, layer"),
        (Norm("none", torch.ones(4)), "a norm of kind 'none' has no gain"),
        (Norm("rms", torch.ones(4), torch.ones(4)), "a norm of kind 'rms' has no shift"),
        (Norm("layer", torch.ones(3)), r"gain \[3\] of the norm is not \[4\]"),
    ],
)
def test_norms_that_do_not_fit_are_refused(norm: Norm, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        norm.check(4)

"""Linear layers with a weight per head."""

from __future__ import annotations

import pytest
import torch

from weft.backends.torch.lib.linear_per_head import head_linear, head_linear_inverse
from weft.ir.op import Case, Op

from .part_calls import check, examples


@pytest.mark.parametrize(("op", "example", "dtype"), examples("head_linear"))
def test_cases_agree_with_the_reference(op: Op, example: Case, dtype: torch.dtype) -> None:
    check(op, example, dtype)


def test_head_linear_multiplies_each_head_by_its_own_weight() -> None:
    x, weight = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([[1.0, 1.0], [10.0, 1.0]])  # two heads of [1, 2]
    assert head_linear(x, weight, 2).tolist() == [[[3, 34]]]
    assert head_linear_inverse(torch.tensor([[[2.0, 3.0]]]), weight, 2).tolist() == [[[2, 2, 30, 3]]]

"""Gather, scatter, top-k and a softmax of masked rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.backends.torch.lib.indexing import top_k, wide
from weft.ir import lookup
from weft.ir.op import Case, Op, case, normal

from .part_calls import assert_close, check, examples, outputs, reference


@pytest.mark.parametrize(("op", "example", "dtype"), examples("gather_rows", "scatter_rows", "top_k", "softmax"))
def test_cases_agree_with_the_reference(op: Op, example: Case, dtype: torch.dtype) -> None:
    check(op, example, dtype)


def test_scatter_rows_writes_the_last_of_equal_indices() -> None:
    indices = np.array([[1, 3, 1, 1], [0, 0, 2, 0]])
    check(lookup("scatter_rows"), case(normal(2, 5, 3), normal(2, 4, 3), indices), torch.float64)
    check(lookup("scatter_rows"), case(normal(2, 3, 5), normal(2, 3, 4), indices, axis=2), torch.bfloat16)


def test_softmax_of_a_masked_row_has_zero_weights_and_gradients() -> None:
    x = torch.tensor([[1.0, -torch.inf, 2.0], [-torch.inf] * 3], dtype=torch.float64, requires_grad=True)
    (y,) = outputs(lookup("softmax"), case(), [x])
    assert_close(y, reference(lookup("softmax"), [x.detach()])[0], 1, 3)
    y.square().sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all() and not x.grad[1].any()


def test_top_k_returns_the_first_of_equals() -> None:
    few = np.random.default_rng(1).integers(0, 3, (40, 9)).astype(float)
    check(lookup("top_k"), case(few, k=4), torch.float32)
    values, indices = top_k(torch.tensor([1.0, 3.0, 3.0, 2.0]), 3)
    assert (values.tolist(), indices.tolist()) == ([3, 3, 2], [1, 2, 3])


def test_wide_is_at_least_f32() -> None:
    assert [wide(torch.zeros(1, dtype=d)).dtype for d in (torch.bfloat16, torch.float32, torch.float64)] == [
        torch.float32,
        torch.float32,
        torch.float64,
    ]

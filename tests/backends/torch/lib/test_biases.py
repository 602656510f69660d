"""Attention by distance: ALiBi, T5 buckets, vectors added to keys and values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from weft.backends.torch.lib import biases
from weft.ir import lookup
from weft.ir.op import Case, Op, case, normal

from .part_calls import check, examples


@pytest.mark.parametrize(("op", "example", "dtype"), examples("relative_position_bias", "alibi", "relative_attention"))
def test_cases_agree_with_the_reference(op: Op, example: Case, dtype: torch.dtype) -> None:
    check(op, example, dtype)


SCORINGS, TRUTHS = ("softmax", "sigmoid"), (False, True)


def test_every_distance_has_the_bucket_of_the_reference() -> None:
    at, keys = np.array([[5000]]), np.arange(10001)[None]
    for bidirectional, far in itertools.product(TRUTHS, (128, 1000, 4096)):
        attrs = {"bidirectional": bidirectional, "max_distance": far}
        check(lookup("relative_position_bias"), case(normal(32, 2), at, keys, **attrs), torch.float64)


def test_alibi_is_the_slope_times_the_distance() -> None:
    distance = torch.tensor([[[0, 1], [-1, 0]]])
    bias = biases.alibi(torch.tensor([0.5, 0.25]), distance)
    assert bias.tolist() == [[[[0, 0.5], [-0.5, 0]], [[0, 0.25], [-0.25, 0]]]]


def test_distance_buckets_are_exact_then_logarithmic() -> None:
    """With 8 buckets up to distance 64, buckets 4 to 7 begin at 4 · 2^i."""
    distance = torch.tensor([0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 64, 10_000])
    assert biases.distance_buckets(distance, 8, 64).tolist() == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7]


def test_relative_rows_clip_the_distance() -> None:
    rows = biases.relative_rows(torch.zeros(5, 1), torch.tensor([[[-9, -2, 0, 1, 9]]]))
    assert rows.tolist() == [[[[0, 0, 2, 3, 4]]]]

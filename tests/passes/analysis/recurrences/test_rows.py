"""Ops that compute each batch row from the same batch row."""

from __future__ import annotations

import pytest

from weft.ir import parse
from weft.passes.analysis.recurrences.rows import is_rowwise

HEAD = """graph g {
  input %x: f32[batch, 4]
  input %s: f32[batch, 4, 3]
  input %m: f32[4, 3]
  input %b: f32[batch, 1]
  %y: """


@pytest.mark.parametrize(
    ("node", "rowwise"),
    [
        ("f32[batch, 4] = add(%x, %x)", True),
        ("f32[batch, 4, 3] = mul(%s, %m)", True),
        ("f32[batch, 3] = matmul(%x, %m)", True),
        ("f32[4, batch] = transpose(%x, axes=[1, 0])", False),
        ("f32[batch, 4] = sum(%s, axes=[2])", True),
        ("f32[4] = sum(%x, axes=[0])", False),
        ("f32[batch, 4] = cumsum(%x, axis=0)", False),
        ("f32[batch, 4] = softmax(%x, axis=1)", True),
        ("f32[batch, 3, 4] = transpose(%s, axes=[0, 2, 1])", True),
        ("f32[4, batch, 3] = transpose(%s, axes=[1, 0, 2])", False),
        ("f32[batch, 4] = expand(%b, shape=[batch, 4])", True),
        ("f32[batch, 2, 2] = reshape(%x, shape=[batch, 2, 2])", True),
        ("f32[4, 3] = exp(%m)", True),  # without rows
        ("f32[batch, 4, 3] = expand(%m, shape=[batch, 4, 3])", True),  # equal rows
    ],
)
def test_batch_rows_are_independent(node: str, rowwise: bool) -> None:
    (one,) = parse(f"{HEAD}{node} output y = %y }}").nodes
    assert is_rowwise(one) == rowwise

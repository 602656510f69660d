"""Softmax attention without an operator of torch: caps, sinks, block-sparse, lightning index."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from weft.backends.torch.lib.softmax_attention import attention, last_rows
from weft.ir.op import Case, Op

from .part_calls import check, examples


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draw normal values in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("op", "example", "dtype"), examples("block_sparse_attention", "lightning_index"))
def test_cases_agree_with_the_reference(op: Op, example: Case, dtype: torch.dtype) -> None:
    check(op, example, dtype)


def test_attention_agrees_with_torch_for_grouped_heads() -> None:
    q, k, v = drawn(2, 4, 3, 8), drawn(2, 2, 5, 8, seed=1), drawn(2, 2, 5, 6, seed=2)
    mask = torch.ones(3, 5, dtype=torch.bool).tril(2)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, 0.3, mask), wanted)


def test_attention_caps_scores_before_the_bias() -> None:
    """One key has score 100 = 2 after the cap, the other 0 + bias 2: both weigh half."""
    q, k, v = torch.tensor([[[[100.0]]]]), torch.tensor([[[[1.0], [0.0]]]]), torch.tensor([[[[1.0], [3.0]]]])
    y = attention(q, k, v, 1.0, bias=torch.tensor([0.0, 2.0]), softcap=2.0)
    assert y.item() == pytest.approx(2.0)


def test_attention_sink_takes_weight_without_a_value() -> None:
    q, k, v = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 3, 2), torch.full((1, 1, 3, 1), 8.0)
    assert attention(q, k, v, 1.0, sinks=torch.zeros(1)).item() == pytest.approx(6.0)  # 3 of 4 equal weights


def test_attention_of_a_query_without_visible_keys_is_zero() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    y = attention(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 1.0, mask)
    assert y.tolist() == [[[[1, 1], [0, 0]]]]


def test_last_rows_picks_one_token_of_each_batch_row() -> None:
    x = torch.arange(12.0).view(2, 3, 2)
    assert last_rows(x, torch.tensor([2, 0])).tolist() == [[[4, 5]], [[6, 7]]]

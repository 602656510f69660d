"""Causal depthwise convolution, of a full sequence and from a state."""

from __future__ import annotations

import pytest
import torch

from weft.backends.torch.lib.convolution import causal_conv, causal_conv_from
from weft.ir.op import Case, Op

from .part_calls import check, examples


@pytest.mark.parametrize(("op", "example", "dtype"), examples("causal_conv"))
def test_cases_agree_with_the_reference(op: Op, example: Case, dtype: torch.dtype) -> None:
    check(op, example, dtype)


def test_causal_conv_sums_the_last_tokens() -> None:
    x, weight = torch.tensor([[[1.0], [2.0], [4.0]]]), torch.tensor([[10.0, 1.0]])
    assert causal_conv(x, weight).flatten().tolist() == [1, 12, 24]
    assert causal_conv(x, weight, torch.tensor([0.5])).flatten().tolist() == [1.5, 12.5, 24.5]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_causal_conv_from_a_state_continues_the_sequence(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((2, 5, 3), (3, 4), (3,)))
    wanted = causal_conv(x, weight, bias)
    first, past = causal_conv_from(None, x[:, : 5 - length], weight, bias)
    then, past = causal_conv_from(past, x[:, 5 - length :], weight, bias)
    torch.testing.assert_close(torch.cat((first, then), 1), wanted)
    assert torch.equal(past, x[:, 2:])  # the last width − 1 inputs

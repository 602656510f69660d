"""Decoders lend contexts: capacities in steps, and memory that is used again."""

from __future__ import annotations

import pytest

from weft.backends.runtime.core.results import ExpertCounts
from weft.ir import WeftError

from ..sums import SumDecoder


@pytest.mark.parametrize(("tokens", "capacity"), [(1, 256), (256, 256), (257, 512), (700, 700)])
def test_capacity_is_a_multiple_of_the_step_up_to_the_maximum(tokens: int, capacity: int) -> None:
    assert SumDecoder(700).compute_capacity(tokens) == capacity


def test_more_tokens_than_the_maximum_are_refused() -> None:
    decoder = SumDecoder(700)
    with pytest.raises(WeftError, match="701 tokens exceed the 700 that the model is compiled"):
        decoder.compute_capacity(701)
    with pytest.raises(WeftError, match="701 tokens"), decoder.context(1, 701):
        pass
    assert decoder.contexts == []


def test_context_of_the_same_size_is_used_again() -> None:
    decoder = SumDecoder()
    with decoder.context(2, 10) as first:
        pass
    with decoder.context(2, 200) as second:
        assert second is first
    with decoder.context(3, 10) as third:
        assert third is not first and first.closed  # released before the new one is allocated


def test_contexts_in_use_are_independent() -> None:
    decoder = SumDecoder()
    with decoder.context(1, 10) as first, decoder.context(1, 10) as second:
        assert first is not second
    assert [context.closed for context in (first, second)] == [False, True]  # one is kept for later


def test_longest_prompt_of_an_encoder_decoder_is_a_source() -> None:
    assert SumDecoder(50).max_prompt == 50 and SumDecoder(50).start is None
    assert SumDecoder(50, start=2).max_prompt == 9 and SumDecoder(50, start=2).start == (2,)
    assert SumDecoder().experts == ExpertCounts(0, 0, 0, 0)

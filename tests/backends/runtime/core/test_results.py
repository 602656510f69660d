"""Results of generation: counts that add up, and rates of measured times."""

from __future__ import annotations

from weft.backends.runtime.core.results import ExpertCounts, Result, Timings


def test_expert_counts_are_added_and_subtracted() -> None:
    first, second = ExpertCounts(5, 3, 1, 1000), ExpertCounts(2, 1, 0, 24)
    assert first + second == ExpertCounts(7, 4, 1, 1024)
    assert first + second - second == first


def test_rates_are_tokens_per_second() -> None:
    timings = Timings(prompt_tokens=30, prefill_seconds=0.5, decoded_tokens=8, decode_seconds=2.0)
    assert (timings.prefill_rate, timings.decode_rate) == (60.0, 4.0)
    assert (Timings(prompt_tokens=3).prefill_rate, Timings(decoded_tokens=3).decode_rate) == (0.0, 0.0)


def test_result_is_printed_as_its_text_and_compared_without_timings() -> None:
    result = Result([1], [2, 3], "two three", timings=Timings(prompt_tokens=1))
    assert str(result) == "two three"
    assert result == Result([1], [2, 3], "two three")

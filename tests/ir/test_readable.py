"""Counts and sizes in words, however large."""

from __future__ import annotations

from weft.ir.readable import format_bytes, format_count


def test_counts_and_bytes_of_any_size_are_formatted() -> None:
    assert format_count(1_234_567) == "1.23 M" and format_count(1_234_600_000_000_000) == "1,235 T"
    assert (
        format_count(10**400).endswith("0 T")
        and format_bytes(10**400).endswith(" GiB")
        and format_bytes(1536) == "1.5 KiB"
    )

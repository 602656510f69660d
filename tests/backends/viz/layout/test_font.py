"""Widths of text, and text wrapped to a width."""

from __future__ import annotations

import itertools

from weft.backends.viz.layout.font import measure_text, wrap_text


def test_wrap_text_fills_lines_up_to_the_width() -> None:
    text = "one two three four five six seven"
    lines = wrap_text(text, 80, 12)
    assert " ".join(lines) == text and len(lines) > 2
    assert all(measure_text(line, 12) <= 80 for line in lines)
    for a, b in itertools.pairwise(lines):
        assert measure_text(f"{a} {b.split()[0]}", 12) > 80  # the line had no room for the next word
    assert wrap_text("incomprehensibilities", 20, 12) == ["incomprehensibilities"]
    assert wrap_text("", 20, 12) == []

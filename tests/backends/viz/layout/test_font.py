"""Widths of text, and text wrapped to a width."""

from __future__ import annotations

import base64
import itertools
import re

import pytest

from weft.backends.viz.layout.font import FONT, format_font_faces, join_lines, measure_text, wrap_text


def test_wrap_text_fills_lines_up_to_the_width() -> None:
    text = "one two three four five six seven"
    lines = wrap_text(text, 80, 12)
    assert " ".join(lines) == text and len(lines) > 2
    assert all(measure_text(line, 12) <= 80 for line in lines)
    for a, b in itertools.pairwise(lines):
        assert measure_text(f"{a} {b.split()[0]}", 12) > 80  # the line had no room for the next word
    assert wrap_text("incomprehensibilities", 20, 12) == ["incomprehensibilities"]
    assert wrap_text("", 20, 12) == []


def test_width_is_the_sum_of_advances() -> None:
    """The files of the font state the same advances."""
    from fontTools.ttLib import TTFont

    for bold, weight in ((False, 400), (True, 600)):
        font = TTFont(FONT / f"inter-{weight}.ttf")
        names, per_em = font.getBestCmap(), font["head"].unitsPerEm
        advances = [font["hmtx"][names[ord(c)]][0] for c in "Weft × 12"]
        assert measure_text("Weft × 12", 10, bold) == pytest.approx(10 * sum(advances) / per_em, abs=0.05)
    assert measure_text("", 10) == 0 and measure_text("\U0001f600", 10) == measure_text("W", 10)


def test_lines_are_joined_without_control_characters() -> None:
    assert join_lines(" two\n\tlines\x1b[2J ") == "two lines [2J"


def test_font_faces_embed_both_weights() -> None:
    faces = re.findall(r"font-weight:(\d+);src:url\(data:font/ttf;base64,([^)]+)\)", format_font_faces())
    assert [weight for weight, _ in faces] == ["400", "600"]
    for weight, data in faces:
        assert base64.b64decode(data) == (FONT / f"inter-{weight}.ttf").read_bytes()

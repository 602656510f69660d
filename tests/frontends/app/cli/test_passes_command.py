"""`weft passes`: the list, and the description of one pass."""

from __future__ import annotations

from ...command import done, refused


def test_passes_are_listed_and_shown() -> None:
    listed = done("passes").stdout
    assert "kv-cache" in listed and "default, of encoders" in listed
    assert "dtype" in done("passes", "cast").stdout
    assert "unknown pass" in refused("passes", "casts-spells")

"""The tree of parts: scopes as groups, equal layers folded into repeats."""

from __future__ import annotations

import random

import pytest

from weft.backends.viz.model.outline import _find_repetitions


def find_by_trial(prints: list[str]) -> list[tuple[int, int]]:
    found = []
    for i in range(len(prints)):
        length, period = 1, 1
        for p in range(1, (len(prints) - i) // 2 + 1):
            end = i + p
            while end + p <= len(prints) and prints[end : end + p] == prints[i : i + p]:
                end += p
            if end - i > max(p, length):
                length, period = end - i, p
        found.append((length, period))
    return found


@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_repetitions_equal_those_of_trying_every_period(kinds: int) -> None:
    rng = random.Random(kinds)
    for length in range(30):
        prints = [str(rng.randrange(kinds)) for _ in range(length)]
        assert _find_repetitions(prints) == find_by_trial(prints)


def test_repetitions_of_thousands_of_layers_are_found_quickly() -> None:
    """Trying every period at every place would take hours."""
    prints = [str(i * i % 4093 % 7) for i in range(4000)]
    assert len(_find_repetitions(prints)) == 4000

"""The counts of words that cost readers time: none rises above its budget, and budgets follow the counts down."""

from __future__ import annotations

from pathlib import Path

import pytest

from .words import BUDGET, Place, findings, sources


@pytest.fixture(scope="module")
def counted(root: Path) -> dict[str, list[Place]]:
    return findings(sources(root))


@pytest.mark.parametrize("rule", BUDGET)
def test_words_stay_within_their_budget(counted: dict[str, list[Place]], rule: str) -> None:
    places, most = counted[rule], BUDGET[rule]
    shown = "\n".join(f"{place.path}:{place.line}: {place.text}" for place in places[:40])
    assert len(places) <= most, f"{len(places)} places of {rule!r}, {most} allowed:\n{shown}"
    assert most - len(places) <= max(5, most // 20), f"lower the budget of {rule!r} to {len(places)}"

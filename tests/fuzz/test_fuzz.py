"""A short run of the harness; `make fuzz` is a long one."""

from __future__ import annotations

from pathlib import Path

from ..sampling import ALL
from .harness import GOOD, fuzz
from .seeds import plant

INPUTS = 250 if ALL else 120


def test_mutated_inputs_of_every_format_are_refused_cleanly(tmp_path: Path) -> None:
    """None ends in a traceback, a hang, or too much memory; no overlap of tensors is accepted."""
    tally = fuzz(plant(tmp_path / "corpus"), seed=20_000, count=INPUTS)
    assert not tally.bad
    totals = tally.totals()
    assert sum(totals.values()) == INPUTS == sum(totals[name] for name in GOOD)
    assert min(totals[name] for name in GOOD) > INPUTS // 10  # mutations that are all refused early find nothing

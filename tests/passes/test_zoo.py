"""The zoo itself: it has every family and preset, and each of its graphs is sound, tiny and says all with its text."""

from __future__ import annotations

import pytest

from weft.frontends.models.families import FAMILIES
from weft.frontends.models.presets import PRESETS
from weft.ir import parse, verify
from weft.passes.core.equivalence import EquivalenceCheck

from ..e2e.families import ROWS
from ..e2e.images import TOWERS
from ..e2e.seq2seq import SEQ2SEQ
from ..e2e.sounds import SOUNDS, SPEECH
from .zoo import TRIED, ZOO


def test_zoo_covers_every_family_and_preset() -> None:
    assert {row.family for row in (ROWS | SEQ2SEQ | TOWERS | SOUNDS | SPEECH).values()} == set(FAMILIES)
    assert {name.partition("/")[2] for name in ZOO if name.startswith("preset/")} == set(PRESETS)


@pytest.mark.halved
@pytest.mark.parametrize("name", TRIED)
def test_graphs_are_sound_and_tiny(name: str) -> None:
    graph = ZOO[name]()
    assert graph is not ZOO[name]()
    verify(graph, recipes=True)
    assert parse(str(graph)) == graph
    assert len(graph) < 200
    equivalence = EquivalenceCheck()
    assert equivalence.run(graph, equivalence.make_inputs(graph))

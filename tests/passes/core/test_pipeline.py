"""Pipelines as values: phases in order, printed as text that parses back."""

from __future__ import annotations

from weft.passes import parse_pipeline
from weft.passes.core.pipeline import Phase, Pipeline
from weft.passes.library.cleanup.cse import Cse
from weft.passes.library.cleanup.dce import Dce
from weft.passes.library.cleanup.fold_constants import FoldConstants


def test_pipeline_prints_phases_with_names_and_without() -> None:
    pipeline = Pipeline((Phase("", (Dce(), Cse())), Phase("fold", (FoldConstants(limit=7),))))
    assert str(pipeline) == "dce, cse; fold: fold-constants{limit=7}"
    assert parse_pipeline(str(pipeline)) == pipeline
    assert str(Pipeline()) == ""


def test_add_phase_returns_a_longer_copy() -> None:
    one = Pipeline((Phase("simplify", (Dce(),)),))
    two = one.add_phase("again", Cse(), Dce())
    assert [p.name for p in two.passes] == ["dce", "cse", "dce"] and [p.name for p in two.phases] == [
        "simplify",
        "again",
    ]
    assert one.passes == (Dce(),)

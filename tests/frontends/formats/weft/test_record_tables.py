"""Tables of records."""

from __future__ import annotations

from typing import Any

import pytest

from weft.frontends.formats.weft.record_tables import build_tables, list_levels, render_card
from weft.ir import WeftError
from weft.ir.storage.documents import Record

STEP = {"pass": "a{b=1}", "effect": "exact", "rewrites": {"r": 2, "s": 1}, "checked": None, "difference": None}
EVALUATION = {
    **{"kind": "evaluation", "against": "x", "text": "/home/me/t.txt", "sha256": "ab", "tokens": 1234, "context": 512},
    "scores": {"kl": 0.1, "nll_loss": -0.02, "nll": 3.0},
}
VERIFICATION = {
    **{"kind": "verification", "reference": "r", "positions": 9},
    **{"max_relative": 1e-3, "tolerance": 1e-6, "passed": False},
}
EARLIER = {"pipeline": "first", "source": {"spec": "s", "hashes": {}}, "passes": [STEP | {"pass": "first"}]}
RECORD: dict[str, Any] = {
    "weft": "1",
    "target": "torch",
    "pipeline": "second",
    "passes": [STEP],
    "source": {"spec": "folder", "description": "a | model", "hashes": {"f": "cd"}, "provenance": EARLIER},
    "measurements": [EVALUATION, VERIFICATION],
    "versions": {"numpy": "2"},
}


def tables() -> dict[str, Any]:
    return {title: rows for title, _, rows in build_tables(Record("here", RECORD))}


def test_earlier_steps_come_first() -> None:
    assert [level.text("pipeline") for level in list_levels(Record("here", RECORD))] == ["first", "second"]
    assert [row[0] for row in tables()["Passes"]] == ["first", "a{b=1}"]
    assert tables()["Sources"] == [("s", "", "no files"), ("folder", "f", "cd")]


def test_rows_have_sums_and_results() -> None:
    assert tables()["Passes"][1] == ("a{b=1}", "exact", "3", "not checked")
    evaluated, verified = tables()["Measurements"]
    assert evaluated[:2] == ("eval: against x", "t.txt, SHA-256 ab")
    assert evaluated[2:] == ("1,234 tokens in windows of 512", "ΔNLL -0.0200, KL 0.1")
    assert verified == ("verify: r", "", "9 positions", "relative error 0.001, tolerance 1e-06: FAILED")
    assert ("target", "torch") in tables()["Record"] and ("versions", "numpy 2") in tables()["Record"]


def test_card_is_markdown_with_escaped_bars() -> None:
    lines = render_card(RECORD | {"versions": {"a": "x|y"}}).splitlines()
    assert lines[6] == "# a | model" and "| versions | a x\\|y |" in lines
    at = lines.index("## Passes") + 2
    assert lines[at] == "| pass | effect | rewrites | check on small random inputs in float64 |"
    assert lines[at + 1 : at + 3] == ["| --- | --- | --- | --- |", "| first | exact | 3 | not checked |"]


@pytest.mark.parametrize("wrong", [{"passes": [{}]}, {"passes": 3}, {"measurements": [{"kind": "x"}]}, {"source": []}])
def test_malformed_record_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(WeftError, match="here: "):
        build_tables(Record("here", RECORD | wrong))

"""Trace of a pass: counts, refusals and nearest misses."""

from __future__ import annotations

from weft.passes import Trace
from weft.passes.core.trace import Miss


def test_nearest_is_the_first_refusal_else_the_deepest_miss_else_the_last_line() -> None:
    trace = Trace()
    assert trace.nearest == ""
    trace.note("a note")
    assert trace.nearest == "a note"
    trace.record_miss("rule", None)
    trace.record_miss("rule", Miss(2, "add (%far)", "reason"))
    trace.record_miss("other", Miss(1, "add (%near)", "why"))
    assert trace.nearest == "nearest miss at add (%far): reason"
    trace.refuse("rule", "site", "because")
    trace.refuse("rule", "later", "because")
    assert trace.nearest == "left %site alone: because"
    assert trace.lines[-1] == "rule: left %later alone: because"


def test_trace_counts_rewrites_by_rule_and_keeps_lines_in_order() -> None:
    trace = Trace()
    trace.record_rewrite("fold", "x")
    trace.refuse("fold", "y", "it is an output")
    trace.record_rewrite("fold", "z")
    trace.note("warning: slow")
    assert trace.rewrites == {"fold": 2}
    assert trace.lines == [
        "fold: rewrote %x",
        "fold: left %y alone: it is an output",
        "fold: rewrote %z",
        "warning: slow",
    ]


def test_rule_that_never_fires_reports_its_nearest_miss_or_none() -> None:
    trace = Trace()
    trace.record_miss("fuse", Miss(2, "add (%sum)", "it has one reader too many"))
    trace.record_miss("pack", None)
    assert trace.lines == [
        "fuse: fired 0 times; nearest miss at add (%sum): it has one reader too many",
        "pack: fired 0 times; nothing resembles it",
    ]
    assert [miss.depth for miss in trace.misses] == [2]

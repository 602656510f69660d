"""The bar of long passes: the time that is left, on a terminal only."""

from __future__ import annotations

import io
import json
import math
import sys

import pytest

from weft.frontends.app.cli.terminal import format_bytes, format_count, format_json, format_remaining, show_progress
from weft.ir.errors import WeftError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("elapsed", "done", "total", "shown"),
    [
        (30.0, 1, 3, "1:00 left"),
        (3600.0, 1, 3, "2:00:00 left"),
        (65.0, 10, 10, "0:00 left"),
        (100.0, 95, 100, "0:05 left"),
        (3.0, 0, 10, ""),  # nothing is known yet
        (None, 1, 10, ""),
        (3.0, 1, None, ""),
    ],
)
def test_remaining_time_follows_from_the_average_speed(
    elapsed: float | None, done: int, total: int | None, shown: str
) -> None:
    assert format_remaining(elapsed, done, total) == shown


def written(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, stage: str, total: int) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")
    with show_progress("opening") as step:
        step(stage, 0, total)
        step(stage, total, total)
    return stream.getvalue()


def test_progress_of_passes_is_a_percentage_and_of_weights_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = written(monkeypatch, Terminal(), "quantize", 134_515_008)
    assert "quantize" in fitted and "100%" in fitted and "left" in fitted and "134515008" not in fitted
    assert "7/7" in written(monkeypatch, Terminal(), "heal", 7)
    assert "2.0/2.0 KiB" in written(monkeypatch, Terminal(), "weights", 2048).replace("bytes", "KiB")


def lines(monkeypatch: pytest.MonkeyPatch, seconds: int, gap: int) -> list[str]:
    """The lines off a terminal of a stage of `seconds`, with a step each `gap` seconds."""
    now = [1000.0]
    monkeypatch.setattr("weft.frontends.app.cli.terminal.time.monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    with show_progress("opening") as step:
        for done in range(0, seconds + 1, gap):
            step("quantize", done, seconds)
            now[0] += gap
    return stream.getvalue().splitlines()


def test_piped_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, io.StringIO(), "quantize", 10) == ""
    assert lines(monkeypatch, 9, 1) == []  # short work
    assert lines(monkeypatch, 100, 5) == [
        "weft: quantize: 10% done, 1:30 left",
        "weft: quantize: 40% done, 1:00 left",
        "weft: quantize: 70% done, 0:30 left",
    ]
    assert len(lines(monkeypatch, 1440, 5)) == 10  # 24 minutes: each tenth
    assert len(lines(monkeypatch, 36_000, 60)) == 120  # 10 hours: every 5 minutes


def test_counts_and_bytes_with_units() -> None:
    assert [format_count(n) for n in (7, 1234, 12_345, 134_515_008, 405_000_000_000, 5 * 10**15)] == [
        *("7", "1.23 k", "12.3 k", "135 M", "405 G", "5,000 T")
    ]
    assert [format_bytes(n) for n in (12, 46_080, 5 << 20, 3 << 30)] == ["12 B", "45.0 KiB", "5.0 MiB", "3.00 GiB"]


def test_json_replaces_infinity_and_nan_by_null() -> None:
    found = {"scores": ({"perplexity": math.inf, "nll": 701.5}, {"kl": math.nan}), "tokens": 3}
    assert json.loads(format_json(found)) == {"scores": [{"perplexity": None, "nll": 701.5}, {"kl": None}], "tokens": 3}
    with pytest.raises(WeftError, match="more than 4,300 digits"):
        format_json({"parameters": 10**5000})

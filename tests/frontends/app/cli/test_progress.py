"""The bar of long passes: the time that is left, on a terminal only."""

from __future__ import annotations

import io
import sys

import pytest

from weft.frontends.app.cli.terminal import format_remaining, show_progress


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
def test_time_left_is_that_of_the_average_speed(
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


def test_passes_show_a_share_and_weights_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = written(monkeypatch, Terminal(), "quantize", 134_515_008)
    assert "quantize" in fitted and "100%" in fitted and "left" in fitted and "134515008" not in fitted
    assert "7/7" in written(monkeypatch, Terminal(), "heal", 7)
    assert "2.0/2.0 KiB" in written(monkeypatch, Terminal(), "weights", 2048).replace("bytes", "KiB")


def test_nothing_is_written_when_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, io.StringIO(), "quantize", 10) == ""

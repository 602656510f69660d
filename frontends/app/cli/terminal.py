"""Terminal output: tables, readable numbers, progress: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weft.ir.errors import WeftError
from weft.ir.readable import escape_controls as escape_controls
from weft.ir.readable import format_bytes as format_bytes
from weft.ir.readable import format_count as format_count

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from weft.passes import Report

Step = Callable[[str, int, int], None]  # stage, done, total
PERCENT_FROM = 10_000  # from this total on, progress is a percentage
FIRST_LINE, LINES_EVERY, LONGEST_SILENCE = 10.0, 30.0, 300.0  # seconds of a stage off a terminal
PIPE_WIDTH = 100_000  # columns of a pipe: its reader gets lines uncut and unwrapped


def echo(text: str = "", *, err: bool = False, newline: bool = True) -> None:
    """Print `text` and, if `newline`, a line break on stdout, or on stderr if `err`; all commands print with it."""
    click.echo(escape_controls(text), err=err, nl=newline)


def make_console(stderr: bool = False) -> Console:
    """Return a rich console that does not truncate lines in a pipe, and raises BrokenPipeError if it is closed."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich calls this in its error handler; the guard ends quietly

    stream = sys.stderr if stderr else sys.stdout
    piped = not stream.isatty()
    return Plain(file=stream, width=PIPE_WIDTH if piped else None, highlight=False, soft_wrap=piped)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> None:
    """Print a table; columns named in `right` (space-separated) are right-aligned."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        grid.add_column(name, justify="right" if name in right.split() else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(escape_controls(cell)) for cell in row))
    print_renderable(grid)


def print_renderable(renderable: RenderableType) -> None:
    """Print an object of rich, in colours on a terminal; its text must have passed through `escape_controls`."""
    screen = make_console()
    with screen.capture() as printed:
        screen.print(renderable)
    click.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))


def format_json(data: Any) -> str:
    """Return `data` as JSON; infinity and NaN become null. Raise WeftError for an integer that Python cannot print."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    try:
        return json.dumps(plain(data), indent=2)
    except ValueError:
        raise WeftError("a number has more than 4,300 digits, which no real model has") from None


json_option = click.option(
    "--json", "wants_json", is_flag=True, help="Print the files written, the passes and notes as JSON."
)


def print_written(
    out: str, report: Report, notes: Iterable[str], seconds: Mapping[str, float], libraries: Iterable[str], **facts: Any
) -> None:
    """Print `facts`, the bytes of each file of `out`, the passes of `report`, `notes`, `seconds` and versions."""
    from weft import __version__

    from ...formats.weft.manifest import list_versions

    path = Path(out)
    files = [p for p in [path, *sorted(path.rglob("*"))] if p.is_file()]
    document = {
        "out": out,
        **facts,
        "files": {f.relative_to(path if f != path else path.parent).as_posix(): f.stat().st_size for f in files},
        "passes": [record.json() | {"seconds": round(record.seconds, 4)} for record in report.records],
        "notes": [*notes],
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "versions": {"weft": __version__, **list_versions(*libraries)},
    }
    echo(format_json(document))


def print_note(message: str) -> None:
    """Print a remark on stderr, which leaves stdout for the result."""
    echo(f"weft: {message}", err=True)


def format_remaining(elapsed: float | None, done: float, total: float | None) -> str:
    """Return the estimated remaining time of a stage, as 1:05 or 2:10:00; "" if it is not known yet.

    The speed is the average over the entire stage, because steps of a fit may be minutes apart.
    """
    if not elapsed or not done or not total:
        return ""
    return f"{format_duration(elapsed * max(total - done, 0) / done)} left"


def format_duration(seconds: float) -> str:
    """Return a duration as 1:05 (minutes and seconds) or 2:10:00 (with hours)."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _report_lines() -> Step:
    """Return the function that updates the progress off a terminal."""
    current, start, last = "", 0.0, 0.0

    def step(stage: str, done: int, total: int) -> None:
        nonlocal current, start, last
        now = time.monotonic()
        if stage != current:
            current, start, last = stage, now, -math.inf
        if now - start < FIRST_LINE or not 0 < done < total:
            return
        if now - last >= min(max(LINES_EVERY, (now - start) * total / done / 10), LONGEST_SILENCE):
            last = now
            print_note(f"{stage}: {done / total:.0%} done, {format_remaining(now - start, done, total)}")

    return step


@contextlib.contextmanager
def show_progress(first: str, unit: str = "bytes") -> Iterator[Step]:
    """Show progress on stderr while the block runs; yield the function that updates it.

    On a terminal it is a bar. Otherwise stages longer than `FIRST_LINE` print lines with the remaining time: every
    `LINES_EVERY` seconds, or every tenth of the work if that is longer, at least every `LONGEST_SILENCE`.

    `first` is shown with a spinner until the first step names a stage and its total. With the `unit` "bytes", the stage
    "weights" is shown in bytes. Progress of other stages is a percentage if their total is at least `PERCENT_FROM`.
    """
    if not sys.stderr.isatty():
        yield _report_lines()
        return
    from rich import progress as rich_progress
    from rich.text import Text

    class Remaining(rich_progress.ProgressColumn):
        def render(self, task: rich_progress.Task) -> Text:
            return Text(format_remaining(task.elapsed, task.completed, task.total), style="progress.remaining")

    opening = [rich_progress.SpinnerColumn(), rich_progress.TextColumn("{task.description}", markup=False)]
    bar = rich_progress.Progress(*opening, console=make_console(stderr=True), transient=True)

    def columns(stage: str, total: int) -> tuple[rich_progress.ProgressColumn, ...]:
        amount: list[rich_progress.ProgressColumn] = [rich_progress.MofNCompleteColumn()]
        if unit == "bytes" and stage == "weights":
            amount = [rich_progress.DownloadColumn(binary_units=True), rich_progress.TransferSpeedColumn()]
        elif total >= PERCENT_FROM:
            amount = [rich_progress.TaskProgressColumn()]
        return (*opening, rich_progress.BarColumn(), *amount, Remaining())

    with bar:
        task, current, last = bar.add_task(escape_controls(first), total=None), first, 0.0

        def step(stage: str, done: int, total: int) -> None:
            nonlocal current, last
            if stage != current:
                bar.columns = columns(stage, total)
                bar.reset(task, description=escape_controls(stage), total=total)
                current = stage
            now = time.monotonic()
            if done >= total or now - last > 0.05:  # blocks arrive by the thousand
                bar.update(task, completed=done, total=total)
                last = now

        yield step

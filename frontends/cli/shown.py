"""Terminal output: tables, readable numbers, progress that disappears when piped."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from weft.backends.readable import count as count
from weft.backends.readable import printable as printable
from weft.backends.readable import size as size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Step = Callable[[str, int, int], None]  # stage, done, in all
WIDE = 100_000  # columns of a pipe: nothing is cut or wrapped for whoever reads it


def echo(text: str = "", *, err: bool = False) -> None:
    """Print a line on stdout, or stderr; the one way by which commands print text."""
    click.echo(printable(text), err=err)


def console(stderr: bool = False) -> Console:
    """A rich console on stdout or stderr that cuts nothing when piped and lets a closed pipe be heard."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich calls this where it handles the error; the guard ends quietly

    stream = sys.stderr if stderr else sys.stdout
    return Plain(file=stream, width=None if stream.isatty() else WIDE, highlight=False, soft_wrap=not stream.isatty())


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> None:
    """Print a table; columns whose names are among the words of `right` align to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        grid.add_column(name, justify="right" if name in right.split() else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    render(grid)


def render(renderable: RenderableType) -> None:
    """Print what rich lays out, in colours on a terminal; its text must be `printable`."""
    screen = console()
    with screen.capture() as printed:
        screen.print(renderable)
    click.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))


def as_json(data: Any) -> str:
    """`data` as JSON, which knows no infinity and no NaN: null stands for them."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(data), indent=2)


def note(message: str) -> None:
    """A remark on stderr, which leaves stdout to the result."""
    echo(f"weft: {message}", err=True)


@contextlib.contextmanager
def progress(first: str, unit: str = "bytes") -> Iterator[Step]:
    """A bar on stderr with amount and remaining time while the block runs; nothing where stderr is no terminal.

    `first` is shown with a spinner until the first step names a stage and its total.
    """
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich import progress as rich_progress

    known: list[rich_progress.ProgressColumn] = [rich_progress.MofNCompleteColumn()]
    if unit == "bytes":
        known = [rich_progress.DownloadColumn(binary_units=True), rich_progress.TransferSpeedColumn()]
    opening = [rich_progress.SpinnerColumn(), rich_progress.TextColumn("{task.description}", markup=False)]
    known = [*opening, rich_progress.BarColumn(), *known, rich_progress.TimeRemainingColumn(elapsed_when_finished=True)]
    bar = rich_progress.Progress(*opening, console=console(stderr=True), transient=True)
    with bar:
        task, current, last = bar.add_task(printable(first), total=None), first, 0.0

        def step(stage: str, done: int, total: int) -> None:
            nonlocal current, last
            if stage != current:
                bar.columns = tuple(known)
                bar.reset(task, description=printable(stage), total=total)
                current = stage
            now = time.monotonic()
            if done >= total or now - last > 0.05:  # blocks come by the thousand
                bar.update(task, completed=done, total=total)
                last = now

        yield step

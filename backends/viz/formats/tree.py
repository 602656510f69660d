"""Pictures for the terminal: a tree of parts with sizes, repetitions and parameters."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from weft.ir.readable import format_count

from ..layout.coordinates import PlacedShape
from ..layout.font import join_lines
from ..model.outline import PicturePart
from .style import EVERY, Sheet

WIDE = 100_000  # columns, so that no line of a file is cut or wrapped


def render_tree(placed: PlacedShape, sheet: Sheet) -> RenderableType:
    """Return a table: a row of `sheet`'s title and description, then a row per part in `placed`; an open part is
    followed by its inner parts. The columns are name and repetitions, description, and parameters."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    parameters = _format_parameters(placed.shape.part)
    table.add_row(Text(join_lines(sheet.title), "bold"), Text(join_lines(sheet.about)), parameters)
    for p in placed.inner:
        for cells in _list_rows(p, "", p is placed.inner[-1]):
            table.add_row(*cells)
    return table


def render_plain_tree(placed: PlacedShape, sheet: Sheet) -> str:
    """Return the table of `render_tree` as plain text without colours."""
    file = io.StringIO()
    Console(file=file, width=WIDE, color_system=None, legacy_windows=False).print(render_tree(placed, sheet))
    return "".join(line.rstrip() + "\n" for line in file.getvalue().splitlines())


def _list_rows(p: PlacedShape, before: str, last: bool) -> Iterator[tuple[Text, Text, Text]]:
    """Yield the row of a part, then of its inner parts; `before` is the indentation, `last`: no sibling follows."""
    label, part = p.shape.label, p.shape.part
    lines = [line for line in (*label.lines, *p.shape.captions) if line]
    is_named = bool(lines) and lines[0] == part.name
    name = part.name if is_named or label.symbol else label.title
    words = [label.symbol or label.title, *lines[1:]] if is_named else [label.symbol] if label.symbol else lines
    style = EVERY[label.kind].edge
    yield (
        Text.assemble((before + ("└─ " if last else "├─ "), "dim"), (join_lines(name), "bold"), part.times),
        Text("" if p.open and not is_named else join_lines(" · ".join(words)), style),
        _format_parameters(part),
    )
    for inner in p.inner:
        yield from _list_rows(inner, before + ("   " if last else "│  "), inner is p.inner[-1])


def _format_parameters(part: PicturePart) -> Text:
    """Format the number of parameters whose first reader is in the part; an empty text if there are none."""
    learned = sum(w.learned for v in part.all_vertices() for w in v.weights)
    return Text(format_count(learned) if learned else "")

"""`weft viz`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from .completion import complete_sources
from .shown import note


@click.command("viz", short_help="Draw a model.")
@click.argument("source", shell_complete=complete_sources)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="The file to write: .html (a page to click through), .svg; default: the name of SOURCE, as a page.",
)
def viz_command(source: str, out: Path | None) -> None:
    """Draw SOURCE: layers folded, the residual stream straight, everything to open by a click.

    \b
    Examples:
      weft viz llama3.1-8b
      weft viz model.py:wide -o wide.svg
    """
    from ..pictures import draw

    out = out or Path(re.sub(r"\W+", "-", Path(source).stem) + ".html")
    draw(source, out)
    note(f"{out} written")

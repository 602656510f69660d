"""`weft certificate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from weft.ir.storage import replace_file

from .options import device_option
from .terminal import echo, print_note, print_table, show_progress


@click.command("certificate", short_help="Show the record of a folder, and check it again.")
@click.argument("folder", type=click.Path())
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write a page (.html) instead of printing tables.")
@click.option("--recheck", is_flag=True, help="Repeat the recorded evaluations and verifications.")
@click.option("--text", "moved", multiple=True, type=click.Path(), help="A text of an evaluation, if it has moved.")
@device_option
@click.option("--trust", is_flag=True, help="Run the code that the folder names, for --recheck.")
@click.pass_context
def certificate_command(ctx: click.Context, /, folder: str, out: Path | None, **options: Any) -> None:
    """Show the record of FOLDER: sources, passes with effects and checks, measurements, versions.

    Exit status 1 if a file of FOLDER, or of a source that is here, differs from its checksum. `weft eval --record` and
    `weft verify --record` add measurements, which --recheck repeats.

    \b
    Examples:
      weft certificate out/
      weft certificate out/ -o certificate.html
      weft certificate out/ --recheck --text notes.txt
    """
    from weft.backends.viz.web.page import render_tables

    from ...formats.weft.record_tables import RecordTable
    from ..api.certificate import certify
    from ..api.draw.comparing import check_html_suffix

    if out is not None:
        check_html_suffix(out)
    with show_progress("checking", "steps") as step:
        certificate = certify(folder, progress=step, **options)
    tables = [*certificate.tables, RecordTable("Checks", ("", "statement", "reason"), certificate.checks)]
    if out is not None:
        with replace_file(out) as path:
            path.write_text(render_tables(f"Certificate of {folder}", tables), encoding="utf-8")
        print_note(f"{out} written")
    for title, columns, rows in tables if out is None else ():
        echo(f"\n{title}\n")
        print_table(columns, rows)
    if failed := [f"{statement}: {reason}" for status, statement, reason in certificate.checks if status == "FAILS"]:
        print_note(f"{folder} differs from its record: {'; '.join(failed)}")
        ctx.exit(1)

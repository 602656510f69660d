"""The option --json of commands that write: a document about what was written, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .terminal import echo, format_json

if TYPE_CHECKING:
    from weft.passes import Report

json_option = click.option(
    "--json", "wants_json", is_flag=True, help="Print what was written, the passes and notes as JSON."
)


def print_written(
    out: str, report: Report, notes: Iterable[str], seconds: Mapping[str, float], libraries: Iterable[str], **facts: Any
) -> None:
    """Print `facts`, the bytes of each file of `out`, the passes of `report`, `notes`, `seconds` and versions."""
    from weft import __version__

    from ...formats.weft.manifest import list_versions

    path = Path(out)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path] if path.is_file() else []
    document = {
        "out": out,
        **facts,
        "files": {(f.relative_to(path).as_posix() if f != path else f.name): f.stat().st_size for f in files},
        "passes": [record.json() for record in report.records],
        "notes": [*notes],
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "versions": {"weft": __version__, **list_versions(*libraries)},
    }
    echo(format_json(document))

"""Pictures of a source, in the format that a file's name asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from weft.backends.folder import whole_file
from weft.backends.viz.page import page
from weft.backends.viz.scene import Shape, scene, unfolded
from weft.backends.viz.svg import svg
from weft.ir.errors import WeftError, unknown

from .drawable import described

FORMATS: dict[str, Callable[[Shape], str]] = {
    ".html": lambda root: page(root, unfolded(root)),
    ".svg": lambda root: svg(root, unfolded(root)),
}


def draw(source: str, out: Path) -> None:
    """Write a picture of `source` to `out`, whole or not at all.

    Raises:
        WeftError: if the source cannot be read, the ending of `out` names no format, or `out` cannot be written.
    """
    if out.suffix not in FORMATS:
        raise WeftError(unknown("format", out.suffix or out.name, FORMATS, f"write one of {', '.join(FORMATS)}"))
    text = FORMATS[out.suffix](scene(described(source)))
    with whole_file(out) as path:
        path.write_text(text, encoding="utf-8")

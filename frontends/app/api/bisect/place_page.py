"""Pictures of a bisection: both models in one page, with the place of the first difference marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.storage import replace_file

from ..draw.comparing import draw_difference
from ..draw.drawable import list_files
from .search import FirstDifference
from .sides import split_prefix


def write_page(sides: tuple[Any, Any], difference: FirstDifference | None, out: Path, trust: bool) -> None:
    """Write the page of both models to `out` atomically. A model with a prefix is drawn as its source or ONNX files.

    Raises:
        WeftError: if a model cannot be drawn, as a PyTorch module.
    """
    sources = [split_prefix(side)[1] for side in sides]
    if any(hasattr(source, "named_modules") for source in sources):
        raise WeftError("a PyTorch module cannot be drawn: name its source, as torch:SOURCE or transformers:FOLDER")
    names, text = set[str](), "equal"
    if difference is not None:
        names = {*difference.values, *(x for place in difference.places for x in place.makes if x)}
        text = "; ".join([difference.kind, *difference.describe()[:1]])
    page = draw_difference(*sources, trust=trust, place=(names, text)).page()
    with replace_file(out, list_files(*sources)) as path:
        path.write_text(page, encoding="utf-8")

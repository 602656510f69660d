"""Live pages: the picture of a model in a folder with the model itself, which runs in the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from weft.ir.errors import WeftError
from weft.passes.edits.legalization import is_fused
from weft.passes.library.cleanup.cse import Cse
from weft.passes.library.cleanup.dce import Dce
from weft.passes.library.cleanup.fold_constants import FoldConstants
from weft.passes.library.fuse.unfuse import Unfuse
from weft.passes.library.observe.ablate import Ablate
from weft.passes.library.observe.expose import Expose

from ....model import SourceLike
from ..compile import CompileReport, compile
from ..draw.drawing import PictureOptions
from ..draw.pictures import build_drawing
from ..source.sources import load_source

OBSERVED = Ablate(mean=True), Expose("everything", tokens="chosen"), Dce(), Cse(), FoldConstants()
TEXT = "The capital of France is"


def write_live_page(
    source: SourceLike,
    out: str | Path,
    look: PictureOptions | None = None,
    *,
    text: str = TEXT,
    tab: str = "live",
    javascript: str = "",
    dtype: str | None = None,
    weights: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> CompileReport:
    """Write a folder with the page of `source` and its model, for any static web server; return the compile report.

    `look` has the options of the picture, `text` the first text in the page, `tab` the tab that it opens at.
    `javascript` is a node_modules folder with the scripts to copy; without it the page loads them from a CDN. `dtype`
    and `weights` are those of `compile` (default: int4 weights).

    Raises:
        WeftError: if the source has no trained weights or reads anything but one sequence of tokens, or as `compile`.
    """
    model = load_source(source)
    kind = model.graph.meta.get("kind")
    if model.random_init:
        raise WeftError(f"{model.description} has no trained weights, so its answers are random; use a checkpoint")
    if kind not in ("decoder", "encoder") or "input_ids" not in model.graph.inputs:
        raise WeftError(f"a live page runs decoders and encoders of text, and {model.spec} is of kind {kind}")
    page = build_drawing(model, look)
    graph = Unfuse().apply_to(model.graph) if any(map(is_fused, model.graph.nodes)) else model.graph
    html = replace(page, more={**page.more, "live": {"text": text}, "tab": tab}).page()
    return compile(
        replace(model, graph=graph),
        out,
        target="web",
        page="live",
        dtype=dtype,
        weights=weights,
        passes=", ".join(map(str, OBSERVED)),
        javascript=javascript,
        files={"index.html": html},
        progress=progress,
    )

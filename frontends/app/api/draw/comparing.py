"""Pictures of a comparison: two sources in one picture, or the passes that rewrote a model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.backends.viz.compare.networks import compare_networks, mark_place
from weft.backends.viz.model.network import Network, build_network
from weft.backends.viz.model.part_costs import compute_totals
from weft.backends.viz.web import diff
from weft.backends.viz.web.diff import PipelineStep, render_steps
from weft.ir.errors import WeftError
from weft.ir.storage import replace_file
from weft.passes.report import Report
from weft.passes.runner import PassRun

from ....model import Model
from ..inspect.counting import DEFAULT_TOKENS, choose_tokens
from .drawable import load_model, read_network
from .drawing import Drawing, PictureOptions

PAGE = ".html"


@dataclass(frozen=True)
class ComparisonDrawing(Drawing):
    """A picture of two networks in one, with marks on parts that differ."""

    @cached_property
    def open_keys(self) -> set[str]:
        """Return the keys of the open parts; if no depth is set, these include parts with changes."""
        return diff.select_open_parts(self.root, self.options.depth, self.options.parts)


def draw_difference(
    source: Any,
    other: Any,
    look: PictureOptions | None = None,
    *,
    trust: bool = False,
    place: tuple[Collection[str], str] | None = None,
) -> ComparisonDrawing:
    """Return the drawing of `source` (before) compared with `other` (after). `look` None: default options. `place`:
    mark only the operations that compute one of these values, with this text.

    Raise WeftError if one of them cannot be read, or would run code without `trust`.
    """
    models = [load_model(s) for s in (source, other)]
    networks = [read_network(s if m is None else m, trust) for s, m in zip((source, other), models, strict=True)]
    tokens = min((choose_tokens(m.graph) for m in models if m is not None), default=DEFAULT_TOKENS)
    first, second = networks
    comparison = compare_networks(first, second) if place is None else mark_place(first, second, *place)
    before, after = (compute_totals(n, tokens) for n in networks)
    data = {"kinds": diff.list_signs(), "difference": diff.convert_totals(comparison, before, after)}
    sheet = diff.build_sheet(comparison, before, after)
    return ComparisonDrawing(diff.join_pictures(comparison), sheet, look or PictureOptions(), data)


class PipelineGraphs:
    """The graphs before and after each pass of a pipeline, to draw at its end; `record_pass` is a `run_passes` hook."""

    def __init__(self, model: Model) -> None:
        self.start = build_network(model.graph)
        self.tokens = choose_tokens(model.graph)
        self.after: list[Network] = []

    def record_pass(self, run: PassRun) -> None:
        """Record the graph after a pass."""
        self.after.append(build_network(run.after))

    def write_page(self, report: Report, out: Path) -> None:
        """Write the HTML page of the passes in `report` to `out` atomically; raise WeftError if there are none."""
        if not report.records:
            raise WeftError("there are no passes to draw: name some with -p, or draw the model by `weft viz`")
        text = render_steps(self.start, list(map(PipelineStep, report.records, self.after)), self.tokens)
        with replace_file(out) as path:
            path.write_text(text, encoding="utf-8")


def check_html_suffix(out: Path) -> None:
    """Raise WeftError if the name of `out` does not end in .html."""
    if out.suffix != PAGE:
        raise WeftError(f"it is written as a page: name a file that ends in {PAGE}, not {out.name}")

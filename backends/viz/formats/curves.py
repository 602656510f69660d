"""Charts of losses over the course of training: one plot per measure of its cost, with a line per model."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..layout.font import join_lines
from .chart import METADATA, use_style


@dataclass(frozen=True)
class Curve:
    """Points (x, y) of the line `name`, and optionally the range (low, high) of y at each of them."""

    name: str
    points: Sequence[tuple[float, float]]
    ranges: Sequence[tuple[float, float]] = ()


def render_curves(
    suffix: str, title: str, measure: str, plots: Mapping[str, Sequence[Curve]], dark: bool = False
) -> bytes:
    """Return a chart with a plot per x-axis in `plots` as bytes of a file of type `suffix`, a key of `chart.METADATA`.

    `measure` is the name of the shared y-axis. Equal arguments yield equal bytes.
    """
    file = io.BytesIO()
    with use_style(dark):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1 + 5 * len(plots), 4), layout="constrained")
        figure.suptitle(join_lines(title), x=0.01, ha="left")
        row = figure.subplots(1, len(plots), sharey=True, squeeze=False)[0]
        for axes, (label, curves) in zip(row, plots.items(), strict=True):
            axes.set_xlabel(label)
            for curve in curves:
                x, y = zip(*curve.points, strict=True) if curve.points else ((), ())
                (line,) = axes.plot(x, y, label=join_lines(curve.name), markevery=max(1, len(x) // 12), markersize=4)
                if curve.ranges:
                    axes.fill_between(x, *zip(*curve.ranges, strict=True), color=line.get_color(), alpha=0.2, lw=0)
        row[0].set_ylabel(measure)
        if any(plots.values()):
            figure.legend(*row[0].get_legend_handles_labels(), loc="outside right upper")
        figure.savefig(file, format=suffix[1:], dpi=150, metadata={"Title": join_lines(title), **METADATA[suffix]})
    return file.getvalue()

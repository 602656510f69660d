"""Line charts as SVG files in weft's style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from weft.backends.viz.formats.chart import use_style

Points = Sequence[tuple[float, float]]


def save_chart(
    path: Path, title: str, x_label: str, y_label: str, series: Mapping[str, Points], *, linear: bool = False
) -> None:
    """Draw `series`, points (x, y) by name, into the SVG file `path`; logarithmic axes have x ticks at the points."""
    with use_style():
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(title=title, xlabel=x_label, ylabel=y_label)
        for name, points in series.items():
            axes.plot(*zip(*points, strict=True), label=name, markevery=max(1, len(points) // 20))
        if not linear:
            axes.set(xscale="log", yscale="log", xticks=sorted({x for points in series.values() for x, _ in points}))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 6)))
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.xaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_major_formatter("{x:g}")
        figure.legend(loc="outside right upper")
        figure.savefig(path, metadata={"Title": title, "Date": None})

"""Charts that compare models: quality against size, the error after each layer, the bits per weight of each layer, and
losses over the course of training."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.readable import format_bytes

from ..layout.font import join_lines
from .style import list_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


METADATA: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".png": {}, ".pdf": {"CreationDate": None}}
# Models cycle through the border colours of these kinds. Markers have another period, so 40 models differ.
SERIES = ("recurrence", "attention", "feed-forward", "position", "experts", "norm", "linear", "embedding")
MARKERS = "osD^v"
# Positions of a label around its point: the side, and the distance upward in points.
PLACES = [(side, up) for away in range(0, 100, 11) for up in (-away, away) for side in (1, -1)]


@dataclass(frozen=True)
class ChartModel:
    """A model in a chart: bytes of its weights, loss compared with the original (`lost`, None: not measured), relative
    error and bits per weight of each measured layer, and `facts` for the legend."""

    name: str
    size: int
    lost: float | None
    errors: Mapping[str, float]
    bits: Mapping[str, float]
    facts: str = ""


def check_chart(out: Path) -> None:
    """Check that a chart can be written to `out`, before models are measured for it.

    Raises:
        WeftError: if charts have no format with the suffix of `out`, it is in no folder or is one itself, or matplotlib
            is not installed.
    """
    if out.suffix not in METADATA:
        raise WeftError(f"cannot write a chart as {out.suffix or out.name}; known are {', '.join(METADATA)}")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise WeftError(f"cannot write a chart to {out}: name a file in a folder that exists")
    try:
        import_module("matplotlib")
    except ImportError as e:
        raise WeftError("charts need the package matplotlib: install weft[viz]") from e


def render_chart(
    suffix: str, title: str, about: str, measure: str, models: Sequence[ChartModel], dark: bool = False
) -> bytes:
    """Return the chart of `models` (the original first) as bytes of a file of type `suffix`, a key of METADATA.

    `about` is the text above the legend. `measure` is the name of `lost` in the title of its plot. It is deterministic.
    """
    with use_style(dark):
        figure = draw_figure(title, about, measure, models)
        return _encode_figure(figure, suffix, title)


def _encode_figure(figure: Figure, suffix: str, title: str) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=suffix[1:], dpi=150, metadata={"Title": join_lines(title), **METADATA[suffix]})
    return file.getvalue()


@contextmanager
def use_style(dark: bool = False) -> Iterator[None]:
    """Apply weft's light or dark colours to matplotlib in a `with` block, regardless of the user's settings."""
    from matplotlib import style
    from matplotlib.rcsetup import cycler

    palette = list_colours(dark)
    names = {
        "ink": ("text.color", "axes.titlecolor"),
        "soft": ("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor", "lines.color"),
        "rule": ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"),
        "paper": ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "lines.markeredgecolor"),
    }
    settings: dict[str, Any] = {name: palette[colour] for colour, group in names.items() for name in group}
    settings |= {"axes.grid": True, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    settings |= {"font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "figure.titlesize": 15}
    # Names of models may contain dollar signs, which must not start a formula.
    settings |= {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "weft"}
    edges = [palette[f"{kind}-edge"] for kind in SERIES]
    settings["axes.prop_cycle"] = cycler(color=edges * len(MARKERS), marker=[*MARKERS] * len(SERIES))
    with style.context(["default", settings]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def draw_figure(title: str, about: str, measure: str, models: Sequence[ChartModel]) -> Figure:
    """Return the figure of `render_chart` in matplotlib's current style: losses over sizes and, if any layer was
    measured, errors and bits by layer."""
    from matplotlib.figure import Figure

    original, *candidates = models
    layers = list(dict.fromkeys(layer for c in models for layer in (*c.errors, *c.bits)))
    figure = Figure(figsize=(13 if layers else 7, 5.6 + 0.19 * len(models)), layout="constrained")
    figure.suptitle(join_lines(title), x=0.01, ha="left", wrap=True)
    grid = figure.add_gridspec(2, 2 if layers else 1)
    sizes = figure.add_subplot(grid[:, 0], yscale="log")
    handles = _plot_sizes(sizes, measure, models)
    if layers:
        errors, bits = (figure.add_subplot(cell, yscale="log") for cell in (grid[0, 1], grid[1, 1]))
        _plot_layers(errors, "error of the residual stream, relative", layers, [{}, *(c.errors for c in candidates)])
        _plot_layers(bits, "bits of a weight", layers, [c.bits for c in models], base=2)
        bits.set_xlabel("layer")
    names = [f"{original.name}, the original", *(c.name for c in candidates)]
    rows = [[_truncate(name, 90), format_bytes(c.size), c.facts] for name, c in zip(names, models, strict=True)]
    labels = [" · ".join(filter(None, row)) for row in rows]
    figure.legend(handles, labels, title=join_lines(about), loc="outside lower left", alignment="left")
    # Labels of points depend on the final layout. Ticks are also created here, while the style is active.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    _label_points(sizes, {line: _shorten_name(c.name) for line, c in zip(handles[1:], candidates, strict=True)})
    return figure


def _plot_sizes(axes: Axes, measure: str, models: Sequence[ChartModel]) -> list[Line2D]:
    """Plot losses over sizes, and their Pareto front; return a line per model, a vertical one for the original."""
    from matplotlib.lines import Line2D

    original, *candidates = models
    unit = format_bytes(max(c.size for c in models)).split()[1]
    scale = 1024 ** ("B", "KiB", "MiB", "GiB").index(unit)
    points = [(c.size / scale, c.lost if c.lost and 0 < c.lost < math.inf else math.nan) for c in candidates]
    lines = [axes.plot(*point)[0] for point in points]
    points = sorted(point for point in points if point[1] > 0)
    best = [point for i, point in enumerate(points) if all(point[1] < lost for _, lost in points[:i])]
    axes.add_line(Line2D([x for x, _ in best], [y for _, y in best], linewidth=1, zorder=1.9))
    lines.insert(0, axes.axvline(original.size / scale, linestyle="--"))
    axes.set(title=f"{measure}, less is better", xlabel=f"size of the weights, {unit}", xlim=(0, None))
    _set_ticks(axes)
    return lines


def _plot_layers(
    axes: Axes, title: str, layers: Sequence[str], series: Sequence[Mapping[str, float]], base: int = 10
) -> None:
    """Plot each of `series` (layer → value), the first of them dashed. Write "not measured" if none is positive."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title)
    if not any(n > 0 for values in series for n in values.values()):
        axes.text(0, 0.9, "not measured", transform=axes.transAxes)
        axes.set_axis_off()
        return
    original, *curves = ([values.get(layer) or math.nan for layer in layers] for values in series)
    axes.add_line(Line2D(range(len(layers)), original, linestyle="--"))
    for values in curves:
        axes.plot(values, markevery=max(1, len(layers) // 20))
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.xaxis.set_major_formatter(lambda x, _: layers[int(x)].rpartition(".")[2] if x in range(len(layers)) else "")
    _set_ticks(axes, base)


def _set_ticks(axes: Axes, base: int = 10) -> None:
    """Label powers of `base` on the log y-axis; for base 10 and a range below 1,000-fold also 2 and 5 times these."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(base, (1, 2, 5) if base == 10 and high < 1000 * low else (1,)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _label_points(axes: Axes, names: Mapping[Line2D, str]) -> None:
    """Write each name next to its point, if possible without covering others; skip points without a positive loss."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    points = {line: np.asarray(line.get_xydata())[0] for line in names}
    points = {line: point for line, point in points.items() if point[1] > 0}
    occupied = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in map(axes.transData.transform, points.values())]
    for line, point in sorted(points.items(), key=lambda pair: -pair[1][1]):
        rule = {"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.6, "shrinkA": 0}
        label = axes.annotate(
            names[line], tuple(point), (0, 0), textcoords="offset points", va="center", arrowprops=rule
        )
        for side, up in PLACES:
            label.set(position=(9 * side, up), ha="left" if side > 0 else "right")
            label.get_window_extent()  # moves the text; its own box excludes the rule
            box = Text.get_window_extent(label)
            if axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max) and not box.count_overlaps(occupied):
                break
        occupied.append(box)


def _shorten_name(name: str) -> str:
    return _truncate(name if "{" in name else name.rstrip("/").rpartition("/")[2], 34)


def _truncate(name: str, most: int) -> str:
    return join_lines(name if len(name) <= most else f"{name[: most - 1]}…")


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
        return _encode_figure(figure, suffix, title)

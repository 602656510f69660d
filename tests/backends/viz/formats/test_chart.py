"""Charts that compare models: positions of points, texts, legibility, and equal files."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from weft.backends.viz.formats.chart import (
    ChartModel,
    Curve,
    check_chart,
    draw_figure,
    render_chart,
    render_curves,
    use_style,
)
from weft.backends.viz.formats.style import DARK, LIGHT
from weft.ir.errors import WeftError

from ....sampling import others_long
from ..colours import contrast

ORIGINAL = ChartModel("model.gguf", 513 << 20, 0.0, {}, {f"layers.{i}": 32.0 for i in range(30)})
NAMES = (
    "a very long name <of a rewrite> & more of it than fits beside a point=cast{dtype=f16}",
    "a/folder/int4", "int4{group=128}", "$\\frac{1}{2}$ of it", "int3{method=rtn, group=64}", "q4_k", "gptq",
)  # fmt: skip


def make_models(count: int) -> list[ChartModel]:
    """Models of which many are close together, as they are in fact."""
    made = random.Random(count)
    found = []
    for i in range(count):
        name, lost = f"{NAMES[i % len(NAMES)]}{i // len(NAMES) or ''}", 0.03 * made.choice((1, 1, 1, 0.02, 20))
        errors = {f"layers.{n}": lost / 9 * (n + 1) for n in range(30)}
        size, facts = round(made.choice((95, 95, 140)) * made.uniform(1, 1.05) * 2**20), f"{i} bits"
        found.append(ChartModel(name, size, lost * made.uniform(1, 1.2), errors, {"layers.0": 4.5 + i}, facts))
    return found


def draw_chart(*others: ChartModel, original: ChartModel = ORIGINAL, dark: bool = False) -> Figure:
    with use_style(dark):
        return draw_figure("title", "about", "KL", [original, *others])


def ticks(axis: Axis) -> list[Text]:
    """Return the numbers along an axis; matplotlib also has some beyond its ends, which it does not draw."""
    low, high = axis.get_view_interval()
    return [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]


def list_numbers(axis: Axis) -> list[str]:
    return [text.get_text().replace("−", "-") for text in ticks(axis) if text.get_text()]


def list_texts(picture: bytes) -> list[str]:
    """Return the text elements of an SVG."""
    return ["".join(t.itertext()) for t in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_points_are_at_their_sizes_and_losses() -> None:
    """The line joins models that no other beats in both; sizes begin at 0, in the unit of the largest."""
    others = [ChartModel(str(n), n << 20, 10.0**-n, {}, {}) for n in (3, 1, 2)]
    worse, none = ChartModel("worse", 5 << 19, 0.2, {}, {}), ChartModel("not measured", 1 << 20, None, {}, {})
    figure = draw_chart(*others, worse, none, original=ChartModel("o", 4 << 20, 0, {}, {}))
    (axes,) = figure.axes  # nothing is known of layers
    assert axes.get_xlim()[0] == 0 and axes.get_xlabel() == "size of the weights, MiB" and axes.get_yscale() == "log"
    original, *points, front = ([list(line.get_xdata()), list(line.get_ydata())] for line in sort_lines(axes))
    assert original[0] == [4, 4] and front == [[1, 2, 3], pytest.approx([0.1, 0.01, 0.001])]
    assert points[:4] == [[[3], [0.001]], [[1], [0.1]], [[2], [0.01]], [[2.5], [0.2]]] and np.isnan(points[4][1][0])
    assert [a.get_text() for a in axes.texts] == ["worse", "1", "2", "3"]  # from above


def sort_lines(axes: Axes) -> list[matplotlib.lines.Line2D]:
    """Return the lines of sizes: the original's, those of the models, and the line that joins some of them."""
    legend, dashed, joined = [], [], []
    for line in axes.lines:
        (dashed if line.get_linestyle() == "--" else joined if line.get_marker() == "None" else legend).append(line)
    return [*dashed, *legend, *joined]


def test_layers_have_lines_of_errors_and_bits() -> None:
    errors, bits = {f"layers.{i}": 0.01 * (i + 1) for i in range(30)}, {"layers.0": 4.3, "layers.29": 8.5}
    _, above, below = draw_chart(ChartModel("int4", 9 << 20, 0.1, errors, bits)).axes
    assert [list(line.get_ydata()) for line in above.lines[1:]] == [list(errors.values())]
    original, own = (np.asarray(line.get_ydata()) for line in below.lines)
    assert set(original) == {32} and own[[0, 29]].tolist() == [4.3, 8.5] and np.isnan(own[1:29]).all()
    assert list_numbers(below.yaxis) == ["4", "8", "16", "32"] and below.get_xlabel() == "layer"
    layers = list_numbers(below.xaxis)
    assert layers[0] == "0" and 5 <= len(layers) <= 12 and set(layers) <= {str(n) for n in range(30)}
    _, above, _ = draw_chart(ChartModel("int4", 9 << 20, 0.1, {}, bits)).axes
    assert [t.get_text() for t in above.texts] == ["not measured"] and not above.axison


@pytest.mark.parametrize("losses", [[5.0], [0.3, 0.31], [0.03, 0.9], [1e-9, 3e5], [7.0, 7.0], [0.0], [float("inf")]])
def test_axes_include_all_losses_and_few_plain_numbers(losses: list[float]) -> None:
    """One that lost nothing, or all, is in the legend alone."""
    figure = draw_chart(*(ChartModel(str(i), 1 << 20, lost, {}, {}) for i, lost in enumerate(losses)))
    axes, (legend,) = figure.axes[0], figure.legends
    low, high = axes.get_ylim()
    assert all(low < lost < high for lost in losses if 0 < lost < 1e9)
    assert 1 <= len(list_numbers(axes.yaxis)) <= 12 and all(f"{float(t):g}" == t for t in list_numbers(axes.yaxis))
    assert len(legend.get_texts()) == 1 + len(losses)


# 17 models have every colour; the layout does not depend on the theme.
@pytest.mark.parametrize(("count", "dark"), others_long([(17, True), (3, False), (1, True), (17, False)], 2))
def test_texts_are_legible_and_do_not_overlap(count: int, dark: bool) -> None:
    """No text covers another, all are within the picture, colours differ enough from the paper (WCAG 2.2)."""
    others, paper = make_models(count), (DARK if dark else LIGHT).paper
    figure = draw_chart(*others, dark=dark)
    (legend,) = figure.legends
    seen = [*figure.texts, legend.get_title(), *legend.get_texts()]
    for axes in figure.axes:
        own = (child for child in axes.get_children() if isinstance(child, Text))
        seen += [axes.xaxis.label, *own, *ticks(axes.xaxis), *ticks(axes.yaxis)]
    shown = {t: Text.get_window_extent(t) for t in seen if t.get_text()}
    texts = [t.get_text() for t in shown]
    assert {"title", "about", "KL, less is better", "bits of a weight", "layer"} <= set(texts)
    for c in others:
        assert any(text.startswith(c.name[:40]) and text.endswith(c.facts) for text in texts), c.name
    for text, box in shown.items():
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1, text
        assert contrast(to_hex(text.get_color()), paper) >= 4.5
    for (one, box), (other, second) in itertools.combinations(shown.items(), 2):
        assert not box.shrunk(0.98, 0.8).overlaps(second.shrunk(0.98, 0.8)), (one, other)
    labels = [t for t in shown if isinstance(t, Annotation)]
    points = [line for line in sort_lines(figure.axes[0])[1:] if line.get_marker() != "None"]
    assert len(labels) == len(points) == count
    for line in points:
        at = figure.axes[0].transData.transform(line.get_xydata()[0])
        assert not any(shown[label].contains(*at) for label in labels)
        assert contrast(to_hex(line.get_color()), paper) > 3
    assert len({(line.get_color(), line.get_marker()) for line in points}) == count


def test_names_are_not_read_as_formulas() -> None:
    """No formula, no markup, no line end."""
    names = ["$x_1$ & <b>", "$\\alpha", "two\nlines\x1b[2J", "中文"]
    models = [ORIGINAL, *(ChartModel(name, 9 << 20, 0.1, {}, {}) for name in names)]
    found = list_texts(render_chart(".svg", "t & $y^2$ <i>", "from $HOME & <there>", "KL", models))
    assert {"$x_1$ & <b>", "$\\alpha", "two lines [2J", "中文", "t & $y^2$ <i>", "from $HOME & <there>"} <= set(found)
    assert "$x_1$ & <b> · 9.0 MiB" in found and "model.gguf, the original · 513.0 MiB" in found


@pytest.mark.parametrize(
    ("suffix", "magic"), others_long([(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
)
def test_equal_models_yield_equal_files(suffix: str, magic: bytes) -> None:
    """Not on the time, nor on the user's settings, which remain as they were."""
    layers = {"layers.0": 4.5} if suffix == ".svg" else {}  # whose ids of elements matplotlib draws at random
    models = [ChartModel("o", 4 << 20, 0, {}, {}), ChartModel("int4", 1 << 20, 0.1, {}, layers)]
    first = render_chart(suffix, "title", "about", "KL", models)
    assert first.startswith(magic) and b"Date" not in first
    with matplotlib.rc_context({"lines.color": "red", "font.size": 30, "text.color": "red", "savefig.dpi": 9}):
        before = dict(matplotlib.rcParams)
        assert render_chart(suffix, "title", "about", "KL", models) == first
        assert dict(matplotlib.rcParams) == before
    assert render_chart(suffix, "title", "about", "KL", models, dark=True) != first


@pytest.mark.parametrize(("dark", "paper", "other"), [(False, LIGHT, DARK), (True, DARK, LIGHT)])
def test_chart_uses_the_colours_of_its_theme(dark: bool, paper: object, other: object) -> None:
    picture = render_chart(".svg", "title", "about", "KL", [ORIGINAL, *make_models(2)], dark).decode()
    for name in ("paper", "ink", "soft", "rule"):
        assert getattr(paper, name) in picture and getattr(other, name) not in picture


def test_unknown_suffix_and_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WeftError, match=r"cannot write a chart as \.gif; known are \.svg, \.png, \.pdf"):
        check_chart(Path("a.gif"))
    check_chart(Path("a.svg"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(WeftError, match=r"charts need the package matplotlib: install weft\[viz\]"):
        check_chart(Path("a.svg"))


CURVES = [Curve("a $1", [(1, 3.0), (2, 2.5)], [(2.9, 3.1), (2.4, 2.6)]), Curve("b\nc", [(1, 2.0), (2, 1.0)])]


def test_every_plot_has_every_curve() -> None:
    plots = {"tokens": CURVES, "seconds": CURVES}
    picture = render_curves(".svg", "Loss", "nats per token", plots).decode()
    assert all(word in picture for word in ("Loss", "nats per token", "tokens", "seconds", "a $1", "b c"))
    assert picture.count('<g id="FillBetween') == 2  # a range per plot
    assert render_curves(".svg", "Loss", "nats per token", plots).decode() == picture
    assert render_curves(".svg", "Loss", "nats per token", plots, dark=True).decode() != picture


def test_a_chart_may_be_empty() -> None:
    assert render_curves(".png", "Loss", "nats", {"tokens": [Curve("training", [])]}).startswith(b"\x89PNG")

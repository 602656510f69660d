"""Charts of losses: the lines of every plot, ranges, names with special characters, equal bytes."""

from __future__ import annotations

from weft.backends.viz.formats.curves import Curve, render_curves

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

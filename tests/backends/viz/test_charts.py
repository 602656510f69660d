"""Charts of evaluations: where marks are, what is drawn, whether words keep within the picture."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest

from weft.backends.viz.charts.axes import Frame, linear, logarithmic, of_bytes, powers_of_two
from weft.backends.viz.charts.trade_off import Candidate, trade_off
from weft.backends.viz.formats.png import png
from weft.backends.viz.layout.font import width
from weft.backends.viz.layout.scene import LINE

SVG = "{http://www.w3.org/2000/svg}"
ORIGINAL = Candidate("model.gguf", 513 << 20, 0.0, {}, {f"layers.{i}": 32.0 for i in range(30)})
OTHERS = [
    Candidate(name, mib << 20, lost, {f"layers.{i}": lost / 9 * (i + 1) for i in range(30)}, {"layers.0": bits})
    for name, mib, lost, bits in (
        ("int8", 140, 8e-4, 8.5),
        ("a/folder/int4", 96, 0.035, 4.6),
        ("int4{group=128}", 93, 0.042, 4.3),
        ("int3{method=rtn, group=64}", 99, 0.6, 4.5),
        ("a very long name <of a rewrite> & more of it than fits beside a point=cast{dtype=f16}", 500, 2e-5, 16.0),
    )
]


@pytest.mark.parametrize("values", [[1.0, 9.0], [0.3, 0.31], [5.0], [1e-9, 3e5], [7.0, 7.0], [16.0, 4.25, 8.5]])
@pytest.mark.parametrize("axis", [linear, logarithmic, of_bytes, powers_of_two])
def test_axes_hold_all_values_between_few_marks(axis: object, values: list[float]) -> None:
    assert callable(axis)
    if axis in (of_bytes, powers_of_two):
        values = [max(value, 1.0) for value in values]
    made = axis(values)
    assert made.low <= min(values) and max(values) <= made.high and made.low < made.high
    assert list(made.marks) == sorted(set(made.marks))
    assert 2 <= len(made.marks) <= (8 if axis is not powers_of_two else 21)
    shares = [made.share(mark) for mark in made.marks]
    assert shares[0] == pytest.approx(0, abs=1e-9) and all(0 <= share <= 1 + 1e-9 for share in shares)
    if not made.log:
        assert [b - a for a, b in itertools.pairwise(shares)] == pytest.approx(
            [1 / (len(shares) - 1)] * (len(shares) - 1)
        )


def test_marks_are_round() -> None:
    assert logarithmic([0.03, 0.9]).marks == (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    assert powers_of_two([4.3, 32.0]).marks == (4, 8, 16, 32)
    sizes = of_bytes([513 * 2**20, 96 * 2**20])
    assert [sizes.spelled(mark) for mark in sizes.marks] == ["0", *(f"{n}00 MiB" for n in range(1, 7))]
    frame = Frame(10, 20, 100, 50, linear([0, 10]), logarithmic([1, 100]))
    assert frame.at(5, 10) == pytest.approx((60, 45))


@pytest.mark.parametrize("dark", [False, True])
def test_every_model_is_drawn_within_the_picture(dark: bool) -> None:
    picture = trade_off("title & more", "about <it>", "KL", ORIGINAL, OTHERS, dark)
    root = ElementTree.fromstring(picture)
    wide, high = int(root.attrib["width"]), int(root.attrib["height"])
    texts = [(t, "".join(t.itertext())) for t in root.iter(f"{SVG}text")]
    for name in ("int8", "int4", "int4{group=128}", "model.gguf, the original", "title & more", "about <it>"):
        assert any(words.startswith(name) for _, words in texts), name
    for element, words in texts:
        kind, x = element.attrib.get("class", ""), float(element.attrib["x"])
        room = width(words, 22 if kind == "name" else LINE)
        left = x - room if " e" in f" {kind}" else x - room / 2 if " m" in f" {kind}" else x
        assert left >= 0 and left + room <= wide + 1 and 0 < float(element.attrib["y"]) < high, words
    dots = [e for e in root.iter(f"{SVG}path") if e.attrib.get("class") == "dot"]
    # A point among the sizes and in the legend, one for each error, and one for the layer whose bits are known.
    assert len(dots) == len(OTHERS) * (2 + 30 + 1)
    colours = {e.attrib["fill"] for e in dots}
    assert len(colours) == len(OTHERS)
    (paper,) = re.findall(r"\.paper\{fill:(#\w+)\}", picture)
    assert all(_contrast(colour, paper) > 3 for colour in colours)  # WCAG 2.2, 1.4.11
    assert png(picture).startswith(b"\x89PNG")


def test_points_are_at_their_sizes_and_losses() -> None:
    """Of two models the smaller is further left, and the one that lost ten times as much as far above as any other."""
    others = [Candidate(str(n), n << 20, 10.0**-n, {}, {}) for n in (1, 2, 3)]
    picture = trade_off("t", "a", "KL", Candidate("o", 4 << 20, 0, {}, {}), others)
    assert "residual stream" not in picture  # nothing is known of layers
    known = [Candidate("1", 1 << 20, 0.1, {}, {"layers.0": 4.5})]
    assert trade_off("t", "a", "KL", Candidate("o", 4 << 20, 0, {}, {}), known).count("not measured") == 1
    dots = re.findall(r'class="dot" transform="translate\(([\d.]+) ([\d.]+)\)"', picture)[:3]
    (x1, y1), (x2, y2), (x3, y3) = ((float(x), float(y)) for x, y in dots)
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2) and x2 > x1
    assert y2 - y1 == pytest.approx(y3 - y2, abs=0.2) and y2 > y1
    (front,) = re.findall(r'class="front" d="M([^"]+)"', picture)
    assert front.count("L") == 2


def test_models_that_others_beat_are_not_on_the_line() -> None:
    others = [Candidate("best", 1 << 20, 0.1, {}, {}), Candidate("worse", 2 << 20, 0.2, {}, {})]
    picture = trade_off("t", "a", "KL", Candidate("o", 4 << 20, 0, {}, {}), others)
    assert 'class="front"' not in picture


def test_nothing_lost_leaves_an_empty_frame() -> None:
    same = Candidate("same", 1 << 20, 0.0, {}, {})
    assert 'class="dot"' in trade_off("t", "a", "KL", Candidate("o", 4 << 20, 0, {}, {}), [same])


def _contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return math.fsum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)

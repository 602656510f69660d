"""Colours: text can be read on all of them, kinds are told apart, also by those who see colours otherwise."""

from __future__ import annotations

import itertools

import pytest

from weft.backends.viz.formats.style import DARK, LIGHT, LOOKS, Paper
from weft.backends.viz.model.labels import KINDS

from .colours import SIMULATED, contrast, distance, lab

TEXT, LINES = 4.5, 3.0  # WCAG 2.2 AA, 1.4.3 and 1.4.11
APART = 5.0  # CIEDE2000; a pair that people just tell apart has about 1
WHITE = ("stream", "input", "group")  # circles, ends of the picture, what has others in it: not by colour
THEMES = {
    "light": (LIGHT, {kind: (x.fill, x.edge) for kind, x in LOOKS.items()}),
    "dark": (DARK, {kind: (x.dark_fill, x.dark_edge) for kind, x in LOOKS.items()}),
}


def test_every_kind_has_a_look() -> None:
    assert LOOKS.keys() == KINDS.keys()


@pytest.mark.parametrize("theme", THEMES)
def test_contrast(theme: str) -> None:
    paper, kinds = THEMES[theme]
    for kind, (fill, edge) in kinds.items():
        assert contrast(fill, paper.ink) >= TEXT and contrast(fill, paper.soft) >= TEXT, kind
        assert min(contrast(edge, ground) for ground in (fill, paper.paper, paper.open)) >= LINES, kind
    around(paper)


def around(paper: Paper) -> None:
    for ground in (paper.paper, paper.open):
        assert min(contrast(ground, text) for text in (paper.ink, paper.soft, paper.chosen)) >= TEXT
        assert min(contrast(ground, line) for line in (paper.line, paper.chosen, paper.found)) >= LINES


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lacking", [None, *SIMULATED])
def test_kinds_are_told_apart_by_colour(theme: str, lacking: str | None) -> None:
    fills = {kind: lab(fill, lacking) for kind, (fill, _) in THEMES[theme][1].items() if kind not in WHITE}
    least = min((distance(fills[a], fills[b]), a, b) for a, b in itertools.combinations(fills, 2))
    print(f"{theme}, {lacking}: {least}")
    assert least[0] >= APART


def test_kinds_are_told_apart_without_colour() -> None:
    assert len({look.mark for look in LOOKS.values()}) == len(LOOKS)


@pytest.mark.parametrize(
    ("first", "second", "published"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
    ],
)
def test_the_distance_is_that_of_its_paper(
    first: tuple[float, float, float], second: tuple[float, float, float], published: float
) -> None:
    assert distance(first, second) == pytest.approx(published, abs=1e-4)

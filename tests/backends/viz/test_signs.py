"""Signs of a comparison: text can be read on them, and they are told apart, also by those who see colours otherwise."""

from __future__ import annotations

import itertools

import pytest

from weft.backends.viz.formats.style import DARK, LIGHT, SIGNS, format_borders
from weft.backends.viz.model.marks import KEPT, sign_to_kind

from .colours import SIMULATED, contrast, distance, lab

TEXT, LINES = 4.5, 3.0  # WCAG 2.2 AA, 1.4.3 and 1.4.11
APART = 5.0  # CIEDE2000; a pair that people just tell apart has about 1
THEMES = {
    "light": (LIGHT, {kind: (x.fill, x.edge) for kind, x in SIGNS.items()}),
    "dark": (DARK, {kind: (x.dark_fill, x.dark_edge) for kind, x in SIGNS.items()}),
}


@pytest.mark.parametrize("theme", THEMES)
def test_contrast(theme: str) -> None:
    paper, signs = THEMES[theme]
    for sign, (fill, edge) in signs.items():
        assert contrast(fill, paper.ink) >= TEXT and contrast(fill, paper.soft) >= TEXT, sign
        assert min(contrast(edge, ground) for ground in (fill, paper.paper, paper.open)) >= LINES, sign


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lacking", [None, *SIMULATED])
def test_signs_are_told_apart_by_colour(theme: str, lacking: str | None) -> None:
    fills = {sign: lab(fill, lacking) for sign, (fill, _) in THEMES[theme][1].items()}
    for a, b in itertools.combinations(fills, 2):
        assert distance(fills[a], fills[b]) >= APART, (a, b)


def test_signs_are_told_apart_without_colour() -> None:
    """By the mark beside the title, and by the border alone."""
    assert len({look.mark for look in SIGNS.values()}) == len(SIGNS)
    assert len({(look.wide, look.dashes) for look in SIGNS.values()}) == len(SIGNS)
    rules = format_borders("rect.{kind}").splitlines()
    assert len(rules) == len(SIGNS) - 1 and not any(sign_to_kind(KEPT) in rule for rule in rules)

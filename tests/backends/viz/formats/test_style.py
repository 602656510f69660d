"""Colours and marks of kinds and signs: legible text, and distinct, also for readers who confuse colours."""

from __future__ import annotations

import itertools

import pytest

from weft.backends.viz.formats.style import DARK, LIGHT, LOOKS, SIGNS, Paper, Sheet, describe_picture, format_borders
from weft.backends.viz.layout.scene import build_scene
from weft.backends.viz.model.labels import KINDS
from weft.backends.viz.model.network import KEPT, Network, sign_to_kind

from ..colours import SIMULATED, contrast, distance, lab
from ..pages import drawn

TEXT, LINES = 4.5, 3.0  # WCAG 2.2 AA, 1.4.3 and 1.4.11


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
def test_kinds_have_contrast_with_text_and_paper(theme: str) -> None:
    paper, kinds = THEMES[theme]
    for kind, (fill, edge) in kinds.items():
        assert contrast(fill, paper.ink) >= TEXT and contrast(fill, paper.soft) >= TEXT, kind
        assert min(contrast(edge, ground) for ground in (fill, paper.paper, paper.open)) >= LINES, kind
    check_paper(paper)


def check_paper(paper: Paper) -> None:
    for ground in (paper.paper, paper.open):
        assert min(contrast(ground, text) for text in (paper.ink, paper.soft, paper.chosen)) >= TEXT
        assert min(contrast(ground, line) for line in (paper.line, paper.chosen, paper.found)) >= LINES


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lacking", [None, *SIMULATED])
def test_kinds_are_distinct_by_colour(theme: str, lacking: str | None) -> None:
    fills = {kind: lab(fill, lacking) for kind, (fill, _) in THEMES[theme][1].items() if kind not in WHITE}
    least = min((distance(fills[a], fills[b]), a, b) for a, b in itertools.combinations(fills, 2))
    print(f"{theme}, {lacking}: {least}")
    assert least[0] >= APART


def test_kinds_are_distinct_by_mark() -> None:
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
def test_colour_distance_equals_published_values(
    first: tuple[float, float, float], second: tuple[float, float, float], published: float
) -> None:
    assert distance(first, second) == pytest.approx(published, abs=1e-4)


SIGN_THEMES = {
    "light": (LIGHT, {kind: (x.fill, x.edge) for kind, x in SIGNS.items()}),
    "dark": (DARK, {kind: (x.dark_fill, x.dark_edge) for kind, x in SIGNS.items()}),
}


@pytest.mark.parametrize("theme", SIGN_THEMES)
def test_signs_have_contrast_with_text_and_paper(theme: str) -> None:
    paper, signs = SIGN_THEMES[theme]
    for sign, (fill, edge) in signs.items():
        assert contrast(fill, paper.ink) >= TEXT and contrast(fill, paper.soft) >= TEXT, sign
        assert min(contrast(edge, ground) for ground in (fill, paper.paper, paper.open)) >= LINES, sign


@pytest.mark.parametrize("theme", SIGN_THEMES)
@pytest.mark.parametrize("lacking", [None, *SIMULATED])
def test_signs_are_distinct_by_colour(theme: str, lacking: str | None) -> None:
    fills = {sign: lab(fill, lacking) for sign, (fill, _) in SIGN_THEMES[theme][1].items()}
    for a, b in itertools.combinations(fills, 2):
        assert distance(fills[a], fills[b]) >= APART, (a, b)


def test_signs_are_distinct_by_mark_and_border() -> None:
    """By the mark beside the title, and by the border alone."""
    assert len({look.mark for look in SIGNS.values()}) == len(SIGNS)
    assert len({(look.wide, look.dashes) for look in SIGNS.values()}) == len(SIGNS)
    rules = format_borders("rect.{kind}").splitlines()
    assert len(rules) == len(SIGNS) - 1 and not any(sign_to_kind(KEPT) in rule for rule in rules)


def test_description_lists_facts_then_parts_without_sums() -> None:
    sheet = Sheet("gpt2", "a decoder", (("Parameters", "124,439,808"), ("Context", "1,024")))
    described = describe_picture(drawn("gpt2"), sheet)
    assert described.startswith("a decoder. Parameters: 124,439,808. Context: 1,024. Parts: input_ids; ")
    assert "layers 0-11 × 12 of LayerNorm, Multi-head attention, LayerNorm, " in described and "+" not in described


def test_description_without_a_sheet_or_parts() -> None:
    assert describe_picture(build_scene(Network("empty", (), {}, {})), None) == "Parts: ."

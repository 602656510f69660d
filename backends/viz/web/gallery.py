"""A page of models side by side, to filter and to sort, each with its picture, its facts and the page that opens it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..formats import style
from ..formats.sheet import Sheet, in_words
from ..formats.svg import ARROW, drawn_size, picture, rules
from ..layout.font import faces
from ..layout.positions import layout
from ..layout.scene import Shape
from . import page

# Letters of the private use area, so that no title or data has them.
FACES, TITLE, DATA = "\ue000", "\ue001", "\ue002"  # where the script puts what it has of a model into a page
SELECTORS = re.compile(r"([^{}]+)\{")


@dataclass(frozen=True)
class Card:
    """A model of a gallery: its facts, its shapes with those that are open, `groups` to choose it by (a name for each
    sort of group, with the groups it is in), and `numbers` to sort it by."""

    sheet: Sheet
    root: Shape
    opened: Collection[str]
    groups: Mapping[str, Sequence[str]]
    numbers: Mapping[str, int]


def gallery(cards: Sequence[Card], title: str) -> str:
    """The page that shows `cards`."""
    data = {
        "cards": [{"name": name, **_card(card)} for name, card in zip(_names(cards), cards, strict=True)],
        "common": page.common(),
        "shell": page.shell(TITLE, DATA, FACES),
        "places": {"faces": FACES, "title": TITLE, "data": DATA},
    }
    sheets = [style.variables(), within(".picture", rules(lambda name: f"var(--{name})"))]
    return page.rendered(
        "gallery.html.j2",
        title=title,
        faces=faces(),
        arrow=ARROW,
        style="\n".join([*sheets, page.text_of("styles/gallery.css")]),
        data=page.as_json(data),
        script=page.text_of("scripts/gallery.js"),
    )


def within(place: str, sheet: str) -> str:
    """The rules of a style sheet for what is in `place` only."""
    return SELECTORS.sub(lambda m: ",".join(f"{place} {s.strip()}" for s in m[1].split(",")) + "{", sheet)


def _names(cards: Sequence[Card]) -> list[str]:
    """Name cards in the URL: by title, numbered if several share one."""
    titles = [card.sheet.title for card in cards]
    counts = (titles[: i + 1].count(title) for i, title in enumerate(titles))
    return [title + (f"-{n}" if n > 1 else "") for title, n in zip(titles, counts, strict=True)]


def _card(card: Card) -> dict[str, Any]:
    placed = layout(card.root, card.opened)
    wide, high = drawn_size(placed)
    return {
        "title": card.sheet.title,
        "about": card.sheet.about,
        "rows": card.sheet.rows,
        "words": in_words(card.root, None),
        "groups": card.groups,
        "numbers": card.numbers,
        "size": [round(wide + 2), round(high + 2)],
        "picture": "".join(picture(placed)),
        "page": page.contents(card.root, card.opened),
    }

"""The gallery page: models to filter and sort, each with a picture, facts and a link to its own page."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..formats import style
from ..formats.sheet import Sheet, describe
from ..formats.svg import ARROW, drawn_size, picture, rules
from ..layout.coordinates import layout
from ..layout.font import faces
from ..layout.scene import Shape
from . import page

# Characters of the private use area, which no title or data contains.
FACES, TITLE, DATA = "\ue000", "\ue001", "\ue002"  # placeholders that the script replaces with data of a model
SELECTORS = re.compile(r"([^{}]+)\{")


@dataclass(frozen=True)
class Card:
    """A model in a gallery: its fact sheet, its root shape and the keys of open shapes, `groups` to filter by
    (criterion → groups that contain the model), and `numbers` to sort by."""

    sheet: Sheet
    root: Shape
    opened: Collection[str]
    groups: Mapping[str, Sequence[str]]
    numbers: Mapping[str, int]


def gallery(cards: Sequence[Card], title: str) -> str:
    """Return the HTML page that shows `cards`."""
    data = {
        "cards": [{"name": name, **_card(card)} for name, card in zip(_names(cards), cards, strict=True)],
        "common": page.common(),
        "shell": page.shell(TITLE, DATA, FACES),
        "places": {"faces": FACES, "title": TITLE, "data": DATA},
    }
    sheets = [style.variables(), within(".picture", rules(lambda name: f"var(--{name})"))]
    return page.render_template(
        "gallery.html.j2",
        title=title,
        faces=faces(),
        arrow=ARROW,
        style="\n".join([*sheets, page.text_of("styles/gallery.css")]),
        data=page.as_json(data),
        script=page.text_of("scripts/gallery.js"),
    )


def within(place: str, sheet: str) -> str:
    """Return the style sheet `sheet` with its rules restricted to elements inside the CSS selector `place`."""
    return SELECTORS.sub(lambda m: ",".join(f"{place} {s.strip()}" for s in m[1].split(",")) + "{", sheet)


def _names(cards: Sequence[Card]) -> list[str]:
    """Return the names of cards in URLs: their titles, with a number if several share one."""
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
        "words": describe(card.root, None),
        "groups": card.groups,
        "numbers": card.numbers,
        "size": [round(wide + 2), round(high + 2)],
        "picture": "".join(picture(placed)),
        "page": page.contents(card.root, card.opened),
    }

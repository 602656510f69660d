"""The gallery page: models to filter and sort, each with a picture, facts and a link to its own page."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..formats import style
from ..formats.style import Sheet, describe_picture
from ..formats.svg import ARROW, draw_contents, format_rules, measure_drawing
from ..layout.coordinates import place_shapes
from ..layout.font import format_font_faces
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


def render_gallery(cards: Sequence[Card], title: str) -> str:
    """Return the HTML page that shows `cards`."""
    data = {
        "cards": [{"name": name, **_convert_card(card)} for name, card in zip(_name_cards(cards), cards, strict=True)],
        "common": page.list_common_data(),
        "shell": page.render_shell(TITLE, DATA, FACES),
        "places": {"faces": FACES, "title": TITLE, "data": DATA},
    }
    sheets = [style.format_variables(), restrict_rules(".picture", format_rules(lambda name: f"var(--{name})"))]
    return page.render_template(
        "gallery.html.j2",
        title=title,
        faces=format_font_faces(),
        arrow=ARROW,
        style="\n".join([*sheets, page.read_resource("styles/gallery.css")]),
        data=page.encode_json(data),
        script=page.read_resource("scripts/gallery.js"),
    )


def restrict_rules(place: str, sheet: str) -> str:
    """Return the style sheet `sheet` with its rules restricted to elements inside the CSS selector `place`."""
    return SELECTORS.sub(lambda m: ",".join(f"{place} {s.strip()}" for s in m[1].split(",")) + "{", sheet)


def _name_cards(cards: Sequence[Card]) -> list[str]:
    titles = [card.sheet.title for card in cards]
    counts = (titles[: i + 1].count(title) for i, title in enumerate(titles))
    return [title + (f"-{n}" if n > 1 else "") for title, n in zip(titles, counts, strict=True)]


def _convert_card(card: Card) -> dict[str, Any]:
    placed = place_shapes(card.root, card.opened)
    wide, high = measure_drawing(placed)
    return {
        "title": card.sheet.title,
        "about": card.sheet.about,
        "rows": card.sheet.rows,
        "words": describe_picture(card.root, None),
        "groups": card.groups,
        "numbers": card.numbers,
        "size": [round(wide + 2), round(high + 2)],
        "picture": "".join(draw_contents(placed)),
        "page": page.list_model_data(card.root, card.opened),
    }

"""The interactive page: a single HTML file that works offline."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader

from .. import panels
from ..formats import style
from ..formats.style import Sheet, describe_picture
from ..formats.svg import ARROW, draw_contents, format_rules, measure_drawing
from ..layout import coordinates
from ..layout.coordinates import place_shapes
from ..layout.font import format_font_faces, load_advances
from ..layout.scene import ALL, ICON, LEADING, LINE, TITLE, Shape
from ..model.labels import KINDS
from ..model.work import SHOWN_TOKENS, list_devices
from . import plain

MOST = 12_000  # maximum number of shapes placed at once
NUMBERS = ("GAP", "APART", "LANE", "PASS", "ACROSS", "PAD", "HEAD", "RAIL", "PORT", "SPREAD", "EDGE", "OVER", "BESIDE")
SCRIPTS = (
    *("base", "repeats", "views", "layout", "draw", "move", "lines", "names", "panel", "open", "search", "keys"),
    *("numbers", "panels/chart", "panels/attention", "panels/positions", "panels/caches", "panels/experts", "sizes"),
    *("panels/prompt", "tour", "diff", "steps", "watch", "state"),
)
LIVE_SCRIPTS = tuple(f"live/{name}" for name in ("asking", "text", "layers", "ablate"))  # of a page that runs the model
STYLES = ("page", "charts", "diff", "live", "tour")


def render_page(root: Shape, opened: Collection[str], more: Mapping[str, Any] | None = None, title: str = "") -> str:
    """Return the HTML page of `root` with the keys `opened` open; `more` extends and overrides its data. With data
    called "live", the page runs the model of its folder."""
    data = list_common_data() | list_model_data(root, opened) | {**(more or {})}
    scripts = LIVE_SCRIPTS if "live" in data else ()
    return render_shell(title or root.label.title, encode_json(data), format_font_faces(), scripts)


def list_model_data(root: Shape, opened: Collection[str]) -> dict[str, Any]:
    """Return the JSON data of a page that depend on the model of `root`; `opened` are the keys of open shapes."""
    model_data: dict[str, Any] = {"root": plain.convert_shape(root), "opened": sorted(opened)}
    if root.network is not None:
        context = root.network.context or SHOWN_TOKENS
        model_data |= {"tokens": min(SHOWN_TOKENS, context), "panels": panels.build_panels(root.network)}
        model_data["origins"] = _index_origins(root.network.origins)
    return model_data


def _index_origins(origins: Mapping[str, tuple[str, str | None]]) -> dict[str, Any]:
    modules = list(dict.fromkeys(origins.values()))
    indices = {module: i for i, module in enumerate(modules)}
    return {"modules": modules, "of": {scope: indices[module] for scope, module in origins.items()}}


def list_common_data() -> dict[str, Any]:
    """Return the JSON data that are the same on every page."""
    return {
        "most": MOST,
        "kinds": {kind: [name, style.LOOKS[kind].mark] for kind, name in KINDS.items()},
        "advances": load_advances(bold=True),
        "sizes": {name: getattr(coordinates, name) for name in NUMBERS}
        | {"TITLE": TITLE, "LINE": LINE, "LEADING": LEADING, "ICON": ICON, "ALL": ALL},
        "numbers": list_devices(),
    }


def read_resource(file: str) -> str:
    """Return the text of a script or style sheet of this package."""
    return (files(__package__) / file).read_text(encoding="utf-8")


def render_template(template: str, **values: Any) -> str:
    """Render the Jinja template file `template` of this package with the variables `values`."""
    environment = Environment(loader=PackageLoader(__package__), autoescape=False, trim_blocks=True)
    return environment.get_template(template).render(values)


def render_tables(title: str, tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]) -> str:
    """Return an HTML page with `tables` (title, columns, rows)."""
    sheet = f"{style.format_variables()}\n{read_resource('styles/tables.css')}"
    return render_template("tables.html.j2", title=title, tables=tables, faces=format_font_faces(), style=sheet)


def encode_json(data: Any) -> str:
    """Serialize data as JSON for a script element."""
    # "</script>" in a name would end the element.
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def render_shell(title: str, data: str, faces: str, scripts: Sequence[str] = ()) -> str:
    """Return an HTML page with a title, JSON `data` for its scripts, and the CSS rules `faces` of its fonts; `scripts`
    are further ones, which run before the last of every page."""
    sheets = [read_resource(f"styles/{name}.css") for name in STYLES]
    borders = style.format_borders('g.part[data-kind="{kind}"]:not(.open) > :is(rect, circle):first-child')
    return render_template(
        "page.html.j2",
        title=title,
        data=data,
        scripts=[read_resource(f"scripts/{name}.js") for name in (*SCRIPTS[:-1], *scripts, SCRIPTS[-1])],
        style="\n".join([style.format_variables(), *sheets, borders]),
        faces=faces,
    )


# Characters of the private use area, which no title or data contains.
FACES, HEADING, DATA = "\ue000", "\ue001", "\ue002"  # placeholders that the script replaces with data of a model
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
        "common": list_common_data(),
        "shell": render_shell(HEADING, DATA, FACES),
        "places": {"faces": FACES, "title": HEADING, "data": DATA},
    }
    sheets = [style.format_variables(), restrict_rules(".picture", format_rules(lambda name: f"var(--{name})"))]
    return render_template(
        "gallery.html.j2",
        title=title,
        faces=format_font_faces(),
        arrow=ARROW,
        style="\n".join([*sheets, read_resource("styles/gallery.css")]),
        data=encode_json(data),
        script=read_resource("scripts/gallery.js"),
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
        "page": list_model_data(card.root, card.opened),
    }

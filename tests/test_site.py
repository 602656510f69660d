"""The documentation as a whole, without building it: what the site lists, names and links to is there.

`make docs` builds the site, and fails on any warning.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import weft
from weft.ir.op import OPS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
FENCED = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"")


def settings() -> dict[str, Any]:
    class Loader(yaml.SafeLoader):
        """Of mkdocs.yml, which names a function of Python."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)
    found: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    return found


def listed(nav: Any) -> list[str]:
    """The pages of a table of contents."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in listed(entry)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    text = FENCED.sub(lambda m: "" if "\n" in m[0] else m[0].strip("`"), _text(page))
    titles = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_the_table_of_contents_has_every_page_once() -> None:
    pages = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    assert sorted(listed(settings()["nav"])) == pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_site_links_exist(page: Path) -> None:
    wrong = []
    for pair in LINK.findall(FENCED.sub("", _text(page))):
        target, _, anchor = "".join(pair).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        there = page.parent / target if target else page
        made = anchor.startswith("weft.")  # by mkdocstrings, of the names in the reference
        if not there.exists() or (anchor and there.suffix == ".md" and not made and anchor not in anchors(there)):
            wrong.append(f"{target}#{anchor}" if anchor else target)
    assert not wrong


def documented() -> list[str]:
    """List the names that the reference pages document."""
    return [name for page in sorted(DOCS.glob("api/*.md")) for name in re.findall(r"^::: (\S+)$", _text(page), re.M)]


def resolved(name: str) -> Any:
    home, _, last = name.rpartition(".")
    if importlib.util.find_spec(home) is None:
        return getattr(resolved(home), last)
    module = importlib.import_module(home)
    return getattr(module, last) if last in vars(module) else importlib.import_module(name)


@pytest.mark.parametrize("name", documented())
def test_reference_names_only_documented_objects(name: str) -> None:
    assert resolved(name).__doc__


def test_the_reference_has_every_public_name_once() -> None:
    names = documented()
    assert len(names) == len(set(names))
    objects = [resolved(name) for name in names]
    public = {name: getattr(weft, name) for name in weft._HOME}
    known = (*objects, *OPS.values())  # the page of weft.ops has every op
    assert "weft.ops" in names
    assert not [name for name, value in public.items() if value not in known and value.__module__ not in names]

"""Pages in Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium: that of the variable CHROMIUM, or the one that is installed."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert path, "the tests of pages need Chromium: install it, or name it in the variable CHROMIUM"
    with sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=path, args=["--no-sandbox", *QUIET])
        yield made
        made.close()


@pytest.fixture
def visit(browser: Browser, tmp_path: Path) -> Iterator[Callable[[str], Page]]:
    """Opens the text of a page from a file; what it logs, what fails in it and what it asks of a network fails."""
    said: list[str] = []
    pages = []

    def opened(text: str) -> Page:
        path = tmp_path / "page.html"
        path.write_text(text, encoding="utf-8")
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(300_000)  # a watchdog only: on a busy machine pages take their time
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda asked: said.append(asked.url) if asked.url != path.as_uri() else None)
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert said == []

"""Pages in Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Page, ViewportSize

SIZE: ViewportSize = {"width": 1200, "height": 900}


class Tab:
    """A page of the browser that tests use one after the other, because a new one starts two processes.

    `said` is what it logs, what fails in it, and what it asks of a network or of files but its own.
    """

    def __init__(self, browser: Browser) -> None:
        self.said: list[str] = []
        self.own = ""  # the address it shows
        self.page = browser.new_page(viewport=SIZE)
        self.page.set_default_timeout(300_000)  # a watchdog only: on a busy machine pages take their time
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda asked: self.said.append(asked.url) if asked.url != self.own else None)

    def open(self, path: Path) -> Page:
        """Show a file as a new page would."""
        self.own = path.as_uri()
        self.page.goto(self.own)
        return self.page

    def tidy(self) -> bool:
        """Forget what a test has changed; false where the page can no longer do so."""
        try:
            self.page.evaluate("localStorage.clear()")
            self.page.mouse.move(0, 0)
            self.page.emulate_media(media="null", color_scheme="null")
            self.page.set_viewport_size(SIZE)
        except Error:
            return False
        return True


@pytest.fixture(scope="session")
def tabs(browser: Browser) -> list[Tab]:
    """Tabs that no test uses now."""
    return []


@pytest.fixture
def visit(browser: Browser, tabs: list[Tab], tmp_path: Path) -> Iterator[Callable[[str], Page]]:
    """Opens the text of a page from a file; what it logs, what fails in it and what it asks of a network fails."""
    path, used = tmp_path / "page.html", list[Tab]()

    def opened(text: str) -> Page:
        path.write_text(text, encoding="utf-8")
        used.append(tabs.pop() if tabs else Tab(browser))
        return used[-1].open(path)

    yield opened
    said = [line for tab in used for line in tab.said]
    for tab in used:
        if not tab.said and tab.tidy():
            tabs.append(tab)
        else:
            tab.page.close()
    assert said == []

"""The server of `weft viz --watch`: its page follows the file, and other hosts, pages and addresses are refused."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from weft.frontends.app.watch.page_server import WatchServer
from weft.frontends.app.watch.watched import Watched

from .test_watched import CODE

LIMIT = 3.0  # seconds from a save to the new picture, on a busy machine


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WatchServer, Path]]:
    monkeypatch.delitem(sys.modules, "sizes", raising=False)
    (tmp_path / "sizes.py").write_text("LAYERS = 2\n")
    path = tmp_path / "model.py"
    path.write_text(CODE)
    server = WatchServer(Watched(str(path)))
    yield server, path
    server.close()


def ask(server: WatchServer, path: str, body: str | None = None, **headers: str) -> tuple[int, str]:
    host, port = server.own.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("GET" if body is None else "POST", path, body, headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_strangers_are_refused(served: tuple[WatchServer, Path]) -> None:
    server, _ = served
    home = server.address.removeprefix(server.own)
    assert ask(server, home)[0] == 200
    assert ask(server, "/")[0] == ask(server, "/wrong/")[0] == 403
    assert ask(server, home, Host="evil.example")[0] == 403
    assert ask(server, f"{home}edit", "{}", Origin="http://evil.example")[0] == 403
    assert ask(server, f"{home}edit", "{}", Origin=server.own)[0] == 200
    assert ask(server, f"{home}nothing", "{}")[0] == 400
    assert ask(server, f"{home}edit", "[")[0] == 400
    assert ask(server, f"{home}compare", '{"number": 99}')[0] == 400
    assert ask(server, f"{home}x/y")[0] == 404


def test_answers_wait_for_a_change(served: tuple[WatchServer, Path]) -> None:
    server, path = served
    home = server.address.removeprefix(server.own)
    now = json.loads(ask(server, f"{home}changes", '{"version": -1}')[1])
    os.utime(path, ns=(1, 1))
    start = time.monotonic()
    after = json.loads(ask(server, f"{home}changes", json.dumps({"version": now["version"]}))[1])
    assert after["version"] == now["version"] + 1 and time.monotonic() - start < LIMIT


def test_the_page_follows_the_file(served: tuple[WatchServer, Path], browser: Browser) -> None:
    server, path = served
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(server.address)
    attention = page.locator('g.part[data-kind="attention"]').first
    expect(attention).to_contain_text("4 heads")
    path.write_text(CODE.replace("heads=4", "heads=4, kv_heads=2"))
    expect(attention).to_contain_text("2 KV heads")
    assert "fresh" in str(attention.get_attribute("class"))
    path.write_text(CODE.replace("heads=4", "heads=3"))
    expect(page.locator("#fault")).to_contain_text("model.py:4")
    expect(attention).to_contain_text("2 KV heads")
    path.write_text(CODE)
    expect(page.locator("#fault")).to_be_hidden()
    page.get_by_role("button", name="Numbers").click()
    page.get_by_label("heads, line 4").fill("2")
    expect(attention).to_contain_text("2 heads")
    page.locator(".factor button").nth(2).click()
    expect(page.locator("svg.chart")).to_be_visible()
    page.get_by_role("button", name="Passes").click()
    page.get_by_text("Fuse and take apart").click()
    page.locator(".pass", has_text="pack-qkv").locator("input").check()
    expect(page.locator(".pass", has_text="pack-qkv")).to_contain_text("2 rewrites")
    assert said == []
    page.close()

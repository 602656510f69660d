"""Live pages in Chromium, from a server that sends nothing but their folders: their numbers are those of traces."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from weft.frontends.app.api.observe.live import write_live_page
from weft.frontends.app.api.observe.trace import open_tracer

from ...e2e.families import ROWS
from ...e2e.head_models import BERT, save, tokenizer
from ..folder_server import serve
from ..node import MODULES

TEXT = "the cat sat on the mat ."
ROWS_SHOWN = ("mixtral", "mamba", "gpt-oss")  # experts; recurrences; windows with sinks
Open = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens the tab Live of a folder's page and waits for a run; a request to another server, or a message, fails."""
    servers: list[ThreadingHTTPServer] = []
    said: list[str] = []
    page = browser.new_page(viewport={"width": 1440, "height": 900})

    def visit(folder: Path, wait: bool = False) -> Page:
        server, own = serve(folder, {})
        servers.append(server)
        page.set_default_timeout(300_000)  # a watchdog only
        allowed = (own, f"blob:{own}", "data:")
        page.context.on("request", lambda asked: None if asked.url.startswith(allowed) else said.append(asked.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"{own}#tab=live")
        page.wait_for_function("live.run || live.error")
        if wait:
            page.wait_for_function("live.fast || live.error")
        assert page.evaluate("live.error") == ""
        return page

    yield visit
    page.close()
    for server in servers:
        server.shutdown()
        server.server_close()
    assert said == []


def settle(page: Page) -> None:
    page.wait_for_function("!asking")
    assert page.evaluate("live.error") == ""


def outputs(page: Page) -> dict[str, np.ndarray]:
    """The outputs of the newest run, without the batch axis."""
    found = page.evaluate(
        "Object.fromEntries(Object.entries(live.run.outputs).map(([k, {dims, data}]) => [k, [dims, [...data]]]))"
    )
    return {name: np.array(data).reshape(dims)[0] for name, (dims, data) in found.items()}


def near(page: Page, traced: Any) -> None:
    """The page's values are those of a trace; logits of layers are those of the last token."""
    values = outputs(page)
    assert set(values) <= set(traced.values)
    for name, array in values.items():
        want = traced.values[name][-1:] if name.startswith("logits.") else traced.values[name]
        assert np.abs(array - want).max() <= 1e-4 * max(1, np.abs(want).max()), name


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The checkpoint of a tiny model and its live page."""

    @functools.cache
    def made(name: str) -> tuple[Path, Path]:
        home = tmp_path_factory.mktemp(name)
        if name == "bert":
            save(home / "hf", "BertForMaskedLM", BERT)
        else:
            ROWS[name].save(home / "hf")
            tokenizer().save_pretrained(home / "hf")
        write_live_page(home / "hf", home / "page", text=TEXT, javascript=str(MODULES), dtype="f32")
        return home / "hf", home / "page"

    return made


@pytest.mark.parametrize("name", [*ROWS_SHOWN, "bert"])
def test_values_are_those_of_traces(name: str, folders: Callable[[str], tuple[Path, Path]], visit: Open) -> None:
    source, folder = folders(name)
    page = visit(folder, wait=name in ("bert", "mamba"))
    with open_tracer(source, ablate=True) as tracer:
        traced = tracer.trace(TEXT)
        assert page.evaluate("live.run.ids") == list(traced.ids)
        near(page, traced)
        kinds = set(page.locator("#views > .group button").all_inner_texts())
        assert ("Experts" in kinds) == (name in ("mixtral", "gpt-oss"))
        assert ("States" in kinds) == (name == "mamba")
        assert ("Attention" in kinds) == (name != "mamba")
        part = next(iter(tracer.inputs))
        count = tracer.inputs[part].shape[0]
        page.evaluate("([part, count]) => setFactors(part, count, factors => { factors[0] = 0.25; })", [part, count])
        settle(page)
        near(page, tracer.trace(TEXT, {part: {0: 0.25}}))


def test_smollm2_explains_itself(smollm2_gguf: Path, tmp_path: Path, visit: Open) -> None:
    write_live_page(smollm2_gguf, tmp_path / "page", javascript=str(MODULES))
    page = visit(tmp_path / "page")
    first = page.locator("table.likely tbody th").first
    assert first.inner_text().strip() == "Paris"
    page.fill("#text", "The capital of Germany is")
    settle(page)
    assert first.inner_text().strip() == "Berlin"
    page.click("#step")
    settle(page)
    assert page.input_value("#text") == "The capital of Germany is Berlin"
    assert page.locator("#views .tokens button").count() == 6
    page.locator("#views .tokens button").nth(4).click()  # the prediction after "is"
    settle(page)
    assert first.inner_text().strip() == "Berlin"
    # Sliders act without another run of the model.
    before = page.evaluate("live.run.seconds")
    page.locator("input[aria-label=Temperature]").fill("2")
    page.locator("input[aria-label='Top-k']").fill("3")
    assert page.locator("table.likely tr:not(.out)").count() == 3
    assert page.evaluate("live.run.seconds") == before
    # Without all sublayers of the first layers the answer is another one, and restored it is the same.
    page.get_by_role("button", name="Change parts").click()
    page.get_by_label("Parts", exact=True).select_option("sublayers")
    page.get_by_role("button", name="Remove all of these").click()
    settle(page)
    assert float(page.inner_text("#divergence").split(":")[1].split()[0]) > 0.01
    page.click("#reset")
    settle(page)
    assert page.locator("#divergence").count() == 0


def test_a_part_of_the_picture_shows_its_values(folders: Callable[[str], tuple[Path, Path]], visit: Open) -> None:
    source, folder = folders("mixtral")
    page = visit(folder)
    page.evaluate("go('layers.1.attn.q')")
    settle(page)
    page.wait_for_selector("#about canvas")
    with open_tracer(source, "parts", layers=1) as tracer:
        want = tracer.trace(TEXT).values["parts.layers.1.attn.q"]
    assert np.abs(outputs(page)["parts.layers.1.attn.q"] - want).max() < 1e-4 * max(1, np.abs(want).max())


def test_texts_run_nothing(folders: Callable[[str], tuple[Path, Path]], visit: Open) -> None:
    _, folder = folders("bert")
    page = visit(folder)
    for text in (
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        '" onmouseover=alert(1) x="',
        "${alert(1)}",
    ):
        page.fill("#text", text)
        settle(page)
        for view in page.evaluate("[...liveViews].filter(([, v]) => v.has()).map(([name]) => name)"):
            page.evaluate(f"liveView = {json.dumps(view)}; showLive()")
    assert page.locator("#about img, #about script").count() == 0

"""Presets as pictures and pages, each made once, and what tests ask of pages."""

from __future__ import annotations

import functools
from typing import Any

from playwright.sync_api import Locator, Page

from weft import load_source
from weft.backends.viz.layout.scene import Shape, build_scene, list_default_open
from weft.backends.viz.model.network import Network, build_network
from weft.backends.viz.web.page import render_page
from weft.frontends.model import Model


@functools.cache
def model_of(preset: str) -> Model:
    return load_source(preset)


@functools.cache
def network_of(preset: str) -> Network:
    return build_network(model_of(preset).graph)


@functools.cache
def drawn(preset: str) -> Shape:
    """The picture of a preset, nothing laid out yet."""
    return build_scene(network_of(preset))


@functools.cache
def of_preset(preset: str) -> str:
    """The page of a preset, as `weft viz` writes it."""
    root = drawn(preset)
    return render_page(root, list_default_open(root))


def part(shown: Page, key: str) -> Locator:
    """Locate the drawing of a part."""
    return shown.locator(f'g.part[data-key="{key}"]')


def box(shown: Page, key: str) -> dict[str, float]:
    """Return the position of a part's box in the window: x, y, width and height in pixels."""
    found: Any = part(shown, key).locator("> rect, > circle").first.bounding_box()
    assert found is not None
    return dict(found)


def address(shown: Page) -> str:
    """The address, once it is written."""
    shown.wait_for_function("writing === 0")
    return str(shown.evaluate("location.href"))

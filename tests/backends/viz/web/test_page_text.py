"""Texts on the page: names that look like markup, recipes, storage that is refused."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect

from weft.backends.viz.layout.scene import build_scene
from weft.backends.viz.model.network import Network, Vertex, Weight
from weft.backends.viz.web.page import render_page

from ..pages import of_preset

Visit = Callable[[str], Page]


def render_operation(name: str, recipe: str = "Source(key='w')") -> str:
    """The page of a network called `name`, of one operation of that name."""
    weight = Weight(f"{name}.weight", "[2, 2]", "f32", 16, recipe)
    vertex = Vertex(name, "linear", "", ("x",), (name,), ("x",), ("f32[n]",), weights=(weight,))
    root = build_scene(Network(name, (vertex,), {"x": "f32[n]"}, {"y": (name, "f32[n]")}))
    return render_page(root, [root.key])


def test_names_that_look_like_markup_are_text(visit: Visit) -> None:
    name = """</script><!--<script>'"&<b onclick=x>"""
    shown = visit(render_operation(name))
    assert shown.title() == name
    assert shown.locator("h1").inner_text() == name
    assert shown.evaluate("(key) => go(key)", name)
    expect(shown.locator("#about code").first).to_have_text(name)
    assert shown.locator("b[onclick]").count() == 0


def test_a_long_recipe_is_counted_and_folded(visit: Visit) -> None:
    keys = [f"model.layers.3.mlp.experts.{i}.up_proj.weight" for i in range(256)]
    experts = ", ".join(f"Transpose(of=Source(key='{key}'), axes=(1, 0))" for key in keys)
    shown = visit(render_operation("w", f"Stack(parts=({experts}), axis=0)"))
    shown.evaluate("go('w')")
    told = shown.locator("#about pre").text_content() or ""
    assert "experts.0.up" in told and "experts.255.up" in told and "experts.1.up" not in told
    assert "… 254 more like these …" in told and "axis=0" in told
    assert len(told.splitlines()) < 25


def test_short_recipe_is_shown_in_full(visit: Visit) -> None:
    recipe = "Concat(parts=(Source(key='q, (and [more'), Scale(of=Source(key=\"k\"), by=0.125)), axis=0)"
    shown = visit(render_operation("w", recipe))
    shown.evaluate("go('w')")
    told = shown.locator("#about pre").text_content() or ""
    assert [line.strip() for line in told.splitlines()] == [
        "Concat(",
        "parts=(",
        "Source(key='q, (and [more')",
        'Scale(of=Source(key="k"), by=0.125)',
        ")",
        "axis=0",
        ")",
    ]


def test_refused_local_storage_is_tolerated(visit: Visit) -> None:
    shown = visit(of_preset("smollm2-135m"))
    shown.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new Error('refused') } })")
    shown.reload()
    shown.click("#theme")
    assert shown.evaluate("dark()")
    shown.wait_for_function("location.hash.includes('theme=dark')")
    shown.reload()
    assert shown.evaluate("dark()")

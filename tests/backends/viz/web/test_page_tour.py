"""The tour of a page: its steps, keys, what can be tried in them, and the handout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from weft.frontends.app.api.draw.pictures import build_drawing

from ..pages import model_of

Visit = Callable[[str], Page]


def page_of(preset: str, **more: object) -> str:
    from dataclasses import replace

    drawing = build_drawing(model_of(preset))
    return replace(drawing, more={**drawing.more, **more}).page()


def test_steps_show_their_part_of_the_picture(visit: Visit) -> None:
    page = visit(page_of("mistral-7b", tab="tour"))
    heading = page.locator("h3.stop")
    expect(heading).to_have_text("1. Text becomes numbers")
    page.keyboard.press("ArrowRight")
    expect(heading).to_have_text("2. Numbers become vectors")
    assert page.locator("g.part.chosen").get_attribute("data-key") == "embed"
    page.click("#on")
    page.click("#on")
    page.click("#on")
    expect(heading).to_have_text("5. Attention: tokens look at each other")
    page.keyboard.press("ArrowLeft")
    expect(heading).to_have_text("4. Norms keep numbers in range")
    assert page.locator("#totals").inner_text().startswith("7.24 B parameters · 32 layers · context of 32,768 tokens")


@pytest.mark.parametrize(
    ("preset", "title", "label", "value", "shown"),
    [
        ("mistral-7b", "Attention", "KV heads", "1", "1 KV head for 32 heads: multi-query; 512 B per token and layer"),
        ("mistral-7b", "Windows", "Layers", "2", "2 layers: a token sees, directly or not, 8,191 tokens"),
        (
            "mistral-7b",
            "Positions",
            "Position",
            "0",
            "Pair 0 at position 0 is turned by 0.0°; a full turn takes 6.28 tokens",
        ),
        ("mistral-7b", "The KV cache", "Tokens", "8", "8 tokens: 1 MiB of keys and values"),
        ("mistral-7b", "Feed-forward", "x", "0", "silu(0.0) = 0.00"),
        ("mistral-7b", "Drawing", "Temperature", "0.05", "100.0 %"),
        ("mamba-130m", "A memory", "Decay", "0.5", "half of it after 1 tokens"),
    ],
)
def test_things_to_try(preset: str, title: str, label: str, value: str, shown: str, visit: Visit) -> None:
    page = visit(page_of(preset))
    page.evaluate("title => goTo(TOUR.findIndex(step => step.title.startsWith(title)))", title)
    page.locator(f"#about input[aria-label='{label}']").fill(value)
    assert shown in page.inner_text("#about")


def test_norms_keep_their_size_and_experts_are_chosen(visit: Visit) -> None:
    page = visit(page_of("mixtral-8x7b"))
    page.evaluate("goTo(TOUR.findIndex(step => step.widget.kind === 'norm'))")
    first = page.locator("#about td").nth(1)
    before = first.inner_text().split("→")[1]
    page.locator("#about input[type=range]").fill("10")
    assert first.inner_text().split("→")[1] == before
    page.evaluate("goTo(TOUR.findIndex(step => step.widget.kind === 'experts'))")
    page.get_by_role("button", name="Another token").click()
    texts = page.locator("#about td:last-child").all_inner_texts()
    assert sum(text.endswith("%") for text in texts) == 2


def test_the_handout_has_all_steps(visit: Visit) -> None:
    page = visit(page_of("gpt2"))
    page.evaluate("window.print = () => {}; goTo(0); printTour()")
    page.emulate_media(media="print")
    assert page.locator("h3.stop:visible").count() == page.evaluate("TOUR.length")
    assert not page.locator("#picture").is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert page.locator("h3.stop").count() == 1


def test_pages_without_a_tour_have_no_tab(visit: Visit) -> None:
    page = visit(page_of("gpt2", tour=[]))
    assert "Tour" not in page.locator("#tabs").inner_text()

"""Makes the pictures of the README and of docs/viz*.md: python docs/pictures/make.py [NAME]..., from the root.

The pages are looked at in Chromium, that of the variable CHROMIUM or the one that is installed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

import weft
from weft.frontends.app.api.draw.galleries import write_gallery
from weft.frontends.app.api.draw.pictures import run_prompt

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "local_global.py"
WEIGHTS = HERE.parents[1] / ".cache" / "weights" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "The capital of France is Paris, and the capital of Italy is"
MOST = 150_000  # bytes
SMALL = 1.25  # pixels of a kept picture for each of its own: fewer than by default


def main(wanted: list[str]) -> None:
    """Make the pictures that are `wanted`, or all of them."""
    for depth, dark in itertools.product((None, 1), (False, True)):
        name = f"local_global{'' if depth is None else '-folded'}{'-dark' * dark}"
        if not wanted or name in wanted:
            weft.draw(EXAMPLE, HERE / f"{name}.png", depth, dark=dark, scale=SMALL)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for name, (make, arrange, size) in PAGES.items():
            if not wanted or name in wanted:
                file = Path(folder) / f"{name}.html"
                make(file)
                shown = browser.new_page(viewport={"width": size[0], "height": size[1]})
                shown.goto(file.as_uri())
                arrange(shown)
                shown.wait_for_timeout(600)
                shown.screenshot(path=HERE / f"{name}.png")
                shown.close()
        browser.close()
    for picture in HERE.glob("*.png"):
        if picture.stat().st_size > MOST:
            sys.exit(f"{picture} has {picture.stat().st_size:,} bytes, more than {MOST:,}")


def preset(name: str) -> Callable[[Path], None]:
    return lambda file: weft.draw(name, file)


def chosen(key: str) -> Callable[[Page], None]:
    """Open a part, which the panel then tells about."""
    return lambda shown: shown.locator(f'g.part[data-key="{key}"]').click()


def panel(name: str) -> Callable[[Page], None]:
    """Open a panel."""
    return lambda shown: shown.evaluate("(name) => showTab(name)", name)


def prompted(file: Path) -> None:
    """The model that the tests run, with a prompt."""
    model = weft.load_source(WEIGHTS)
    weft.draw(model, file, more={"prompt": run_prompt(model, PROMPT)})


def asked(shown: Page) -> None:
    """Layer 12 of the prompt, and the last token."""
    shown.evaluate("Object.assign(look, { layer: 12, token: PROMPT.tokens.length - 1 })")
    panel("prompt")(shown)


def fitted(shown: Page) -> None:
    """The whole picture."""
    shown.keyboard.press("0")


def gallery(file: Path) -> None:
    write_gallery(file, ["gpt2", "llama3.1-8b", "mixtral-8x7b", "deepseek-v3", "mamba-130m", "bert-base"])


PAGES: dict[str, tuple[Callable[[Path], None], Callable[[Page], None], tuple[int, int]]] = {
    "llama3.1-8b": (preset("llama3.1-8b"), chosen("layers.0.attn"), (1280, 900)),
    "mixtral-8x7b": (preset("mixtral-8x7b"), chosen("layers.0.ffn"), (1280, 900)),
    "deepseek-v3": (preset("deepseek-v3"), fitted, (1280, 1100)),
    "t5-base": (preset("t5-base"), fitted, (1280, 1100)),
    "mamba-130m": (preset("mamba-130m"), chosen("layers.0.attn"), (1280, 900)),
    "panel-attention": (preset("mistral-7b"), panel("attention"), (1280, 900)),
    "panel-cache": (preset("deepseek-v3"), panel("caches"), (1280, 760)),
    "panel-prompt": (prompted, asked, (1280, 1000)),
    "gallery": (gallery, lambda shown: None, (1280, 900)),
}

if __name__ == "__main__":
    main(sys.argv[1:])

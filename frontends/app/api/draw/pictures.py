"""Pictures of a source, in the format of a file name, or for a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.backends.viz.formats.flowcharts import render_dot, render_mermaid
from weft.backends.viz.formats.svg import render_png
from weft.backends.viz.formats.tree import render_plain_tree
from weft.backends.viz.layout.scene import build_scene
from weft.backends.viz.model.network import Network
from weft.backends.viz.panels import prompts
from weft.ir.errors import WeftError, unknown_name_error
from weft.ir.storage import replace_file, scratch_folder

from ....model import Model, SourceLike
from ..inspect.counting import inspect
from .comparing import draw_difference
from .drawable import list_files, load_model, read_network
from .drawing import Drawing, PictureOptions
from .fact_sheet import build_fact_sheet, build_short_sheet
from .tour import build_tour, write_totals

FORMATS: dict[str, Callable[[Drawing], str | bytes]] = {
    ".html": lambda drawing: drawing.page(),
    ".svg": lambda drawing: drawing.svg(),
    ".png": lambda drawing: render_png(drawing.svg(), drawing.options.scale),
    ".mmd": lambda drawing: render_mermaid(drawing.placed_root, drawing.sheet),
    ".dot": lambda drawing: render_dot(drawing.placed_root, drawing.sheet),
    ".txt": lambda drawing: render_plain_tree(drawing.placed_root, drawing.sheet),
}


def draw(
    source: SourceLike,
    out: str | Path,
    depth: int | None = None,
    parts: Iterable[str] = (),
    *,
    vs: SourceLike | None = None,
    more: Mapping[str, Any] | None = None,
    trust: bool = False,
    **look: Any,
) -> None:
    """Write a picture of `source` to `out` atomically, in the format of its suffix.

    .html is an interactive page, .svg and .png the picture with a fact sheet, .mmd Mermaid for Markdown, .dot a graph
    for Graphviz, .txt a tree. With `vs`, another source, the picture compares both and marks parts that are new,
    removed or changed in `vs`. `depth` levels of parts (None: down to layers) and the parts in `parts` are open.
    `dark` and `scale` (.png pixels per unit) apply to .svg and .png. `more` is additional data for a page, by name.
    `trust` allows weft to run the architecture file from which a folder of PyTorch was compiled.

    Raises:
        WeftError: if the source cannot be read, the suffix of `out` is not a format, a name of `parts` is unknown, or
            `out` cannot be written.
    """
    out = Path(out)
    check_format(out)
    picture = build_drawing(source, PictureOptions(depth, tuple(parts), **look), vs, trust)
    data = FORMATS[out.suffix](replace(picture, more={**picture.more, **more}) if more else picture)
    with replace_file(out, list_files(source, vs)) as path:
        path.write_bytes(data if isinstance(data, bytes) else data.encode())


def check_format(out: Path) -> None:
    """Raise WeftError if the suffix of `out` is not a key of `FORMATS`."""
    if out.suffix not in FORMATS:
        raise WeftError(
            unknown_name_error("format", out.suffix or out.name, FORMATS, f"write one of {', '.join(FORMATS)}")
        )


def build_drawing(
    source: SourceLike, look: PictureOptions | None = None, vs: SourceLike | None = None, trust: bool = False
) -> Drawing:
    """Return the drawing of `source`, or of its comparison with `vs`, with options `look`; `trust` as in `draw`."""
    if vs is not None:
        return draw_difference(source, vs, look, trust=trust)
    model = load_model(source)
    network: Network = read_network(source if model is None else model, trust)
    if model is None:
        return Drawing(build_scene(network), build_short_sheet(network), look or PictureOptions())
    facts = inspect(model)
    page_data = {"totals": write_totals(facts), "tour": build_tour(model, network, facts)}
    return Drawing(build_scene(network), build_fact_sheet(model, facts), look or PictureOptions(), page_data)


def run_prompt(model: Model, prompt: str, step: prompts.Step = lambda done, count: None) -> dict[str, Any]:
    """Return attention weights and predictions of `model` for `prompt`, as data for a page; `step` reports progress.

    Raises:
        WeftError: if the model has no tokenizer or no weights, or the prompt cannot be drawn.
    """
    from weft.backends.runtime.text.tokenizer import Tokenizer

    if model.random_init:
        raise WeftError(f"{model.description} has no trained weights, so its attention is random; use a checkpoint")
    if model.tokenizer is None:
        raise WeftError(f"{model.description} has no tokenizer to read the prompt with: draw it without --prompt")
    with scratch_folder() as folder:
        model.tokenizer(folder)
        tokenizer = Tokenizer(folder)
    return {"text": prompt, **prompts.run_prompt(model.graph, tokenizer.encode(prompt), tokenizer.decode, step)}

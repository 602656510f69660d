"""`weft viz` and `weft gallery`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .completion import complete_sources
from .terminal import print_note, print_renderable, show_progress

if TYPE_CHECKING:
    from ...model import Model
    from ..api.draw.drawing import PictureOptions

FORMATS = (".html", ".svg", ".png", ".mmd", ".dot", ".txt")
PRINTED = (".svg", ".png")


@click.command("viz", short_help="Draw a model.")
@click.argument("source", shell_complete=complete_sources)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, allow_dash=True),
    help="The file to write: .html (a page to click through), .svg, .png, .mmd (Mermaid), .dot (Graphviz), .txt (a "
    "tree), or - for the tree on the terminal; default: the name of SOURCE, as a page.",
)
@click.option("--depth", type=click.IntRange(0), help="Levels of parts to expand; default: the layers and their parts.")
@click.option(
    "--open", "parts", multiple=True, metavar="PART", help="Also expand this part, such as attn; may be repeated."
)
@click.option("--vs", "other", shell_complete=complete_sources, help="A source to compare with, drawn next to SOURCE.")
@click.option("--theme", type=click.Choice(["light", "dark"]), help="The colours of .svg and .png; default: light.")
@click.option(
    "--scale",
    type=click.FloatRange(0, min_open=True),
    help="Resolution of a .png: pixels per unit of the picture; default: 2.",
)
@click.option("--trust", is_flag=True, help="Run the architecture file that a PyTorch folder names as its source.")
@click.option(
    "--prompt",
    metavar="TEXT",
    help="Run the model on this text, and show attention weights and predicted next tokens (.html only).",
)
@click.option(
    "--live",
    is_flag=True,
    help="Write a folder with the page and the model, which runs in the page; open it from a web server.",
)
@click.option(
    "--javascript",
    type=click.Path(file_okay=False),
    help="With --live: a node_modules folder with the scripts to copy; default: ./node_modules, or else a CDN.",
)
@click.option("--tour", is_flag=True, help="Open the page at a tour that explains this model step by step.")
@click.option(
    "--watch", is_flag=True, help="Serve the page of an architecture file on this machine, and follow the file."
)
@click.option("--weights", help="With --live: quantization of the weights, such as int8; default: int4.")
def viz_command(
    source: str,
    out: Path | None,
    depth: int | None,
    parts: tuple[str, ...],
    other: str | None,
    theme: str | None,
    scale: float | None,
    trust: bool,
    prompt: str | None,
    live: bool,
    javascript: str | None,
    weights: str | None,
    tour: bool,
    watch: bool,
) -> None:
    """Draw SOURCE. Repeated layers are drawn once, and the residual stream is a straight line.

    SOURCE may also be an .onnx file of any exporter, or a compiled folder.

    With --vs, SOURCE is on the left and the other model is on the right; removed, new and changed parts are marked.

    \b
    Examples:
      weft viz llama3.1-8b                              llama3-1-8b.html, a page
      weft viz llama3.1-8b -o -                         a tree: parts, sizes, parameters
      weft viz model.py:wide -o wide.svg --open attn    the picture with a fact sheet
      weft viz model.gguf -o model.png --theme dark --scale 3
      weft viz model.gguf --prompt "The capital of France is"
      weft viz llama3.1-8b --vs mistral-7b              llama3-1-8b-vs-mistral-7b.html
      weft viz model.gguf --live -o page/               a folder with a page in which the model runs
      weft viz model.py --watch                         a page that is drawn again whenever model.py is saved
    """
    from weft.backends.viz.formats.tree import render_tree

    from ..api.draw.drawing import PictureOptions
    from ..api.draw.pictures import build_drawing, check_format, draw

    if watch:
        _watch(source, PictureOptions(depth, parts))
        return
    if live:
        _write_live_page(source, out, PictureOptions(depth, parts), prompt, javascript, weights, tour)
        return
    if prompt is not None and (other or (out and out.suffix != ".html")):
        raise click.UsageError("--prompt needs the .html page of one model: leave out --vs, and let -o end in .html")
    if str(out) == "-":
        picture = build_drawing(source, PictureOptions(depth, parts), other, trust)
        print_renderable(render_tree(picture.placed_root, picture.sheet))
        return
    names = [re.sub(r"\W+", "-", Path(s).stem) for s in (source, other) if s]
    out = out or Path("-vs-".join(names) + ".html")
    check_format(out)
    if theme and out.suffix not in PRINTED:
        raise click.UsageError(f"--theme is for {' and '.join(PRINTED)}: leave it out for {out.suffix}")
    if scale and out.suffix != ".png":
        raise click.UsageError(f"--scale is for .png: leave it out for {out.suffix}")
    if tour and (other or out.suffix != ".html"):
        raise click.UsageError("--tour needs the .html page of one model: leave out --vs, and let -o end in .html")
    subject, page_data = (source, {}) if prompt is None else _run_prompt(source, prompt)
    page_data |= {"tab": "tour"} if tour else {}
    draw(subject, out, depth, parts, vs=other, more=page_data, trust=trust, dark=theme == "dark", scale=scale or 2.0)
    print_note(f"{out} written")


def _watch(source: str, look: PictureOptions) -> None:
    """Serve the page of the architecture file `source` until Ctrl-C."""
    import threading

    from ..watch.page_server import WatchServer
    from ..watch.watched import Watched

    server = WatchServer(Watched(source, look))
    print_note(f"{source} is drawn at {server.address} after every save; Ctrl-C ends")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.close()


def _write_live_page(
    source: str,
    out: Path | None,
    look: PictureOptions,
    prompt: str | None,
    javascript: str | None,
    weights: str | None,
    tour: bool,
) -> None:
    """Write the live page of `source` into the folder `out`, and print notes of the compiler."""
    from ..api.observe.live import TEXT, write_live_page

    folder = out or Path(re.sub(r"\W+", "-", Path(source).stem))
    if folder.suffix in FORMATS:
        raise click.UsageError(f"--live writes a folder: let -o name one, not the file {folder}")
    modules = javascript or ("node_modules" if Path("node_modules/onnxruntime-web").is_dir() else "")
    text = TEXT if prompt is None else prompt
    with show_progress(f"reading {source}") as step:
        report = write_live_page(
            source,
            folder,
            look,
            text=text,
            tab="tour" if tour else "live",
            javascript=modules,
            weights=weights,
            progress=step,
        )
    for note in report.notes:
        print_note(note)
    print_note(f"{folder} written; to look at it: python -m http.server --directory {folder}")


def _run_prompt(source: str, prompt: str) -> tuple[Model | str, dict[str, Any]]:
    """Return the model to draw, and page data with its attention and predictions for a prompt."""
    from ... import load_source
    from ..api.draw.pictures import run_prompt

    model = load_source(source)
    with show_progress("running the prompt", unit="operations") as step:
        return model, {"prompt": run_prompt(model, prompt, lambda done, count: step("running the prompt", done, count))}


@click.command("gallery", short_help="A page of models side by side.")
@click.argument("sources", nargs=-1, metavar="[SOURCE]...", shell_complete=complete_sources)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), default="gallery.html", show_default=True, help="The page to write."
)
def gallery_command(sources: tuple[str, ...], out: Path) -> None:
    """Draw each SOURCE (default: all presets) on one page, with filters, sorting, and a link to the page of each model.

    \b
    Examples:
      weft gallery
      weft gallery llama3.1-8b model.gguf model.py:wide -o mine.html
    """
    from ..api.draw.galleries import write_gallery

    with show_progress("reading", unit="models") as step:
        count = write_gallery(out, sources, step)
    print_note(f"{out} written: {count} models")

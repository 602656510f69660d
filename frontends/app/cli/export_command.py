"""`weft export`."""

from __future__ import annotations

import time
from typing import Any

import click

from .completion import complete_sources
from .opt_command import report_passes
from .options import adapter_option, add_passes_option, default_option, seed_option, without_option
from .terminal import json_option, print_note, print_written, show_progress


@click.command("export", short_help="Write a checkpoint for transformers or llama.cpp.")
@click.argument("source", shell_complete=complete_sources)
@click.option(
    "--format",
    metavar="hf|safetensors|gguf",
    help="The format; default: from the suffix of -o: .gguf, .safetensors, otherwise hf.",
)
@click.option("-o", "--out", required=True, type=click.Path(), help="The folder (hf) or file to write.")
@add_passes_option("A pipeline of passes to run first, or @FILE that contains it; default: none.", default="")
@click.option(
    "--dtype", help="f32, f16, bf16 or, for gguf, q8_0; default: the dtype that stores the weights without rounding."
)
@default_option(
    "--weights",
    "auto",
    "Write quantized weights as codes, as floats, or (auto) as codes if the format supports all of them.",
    metavar="auto|codes|float",
)
@adapter_option
@click.option("--trace", is_flag=True, help="Report on stderr: the rewrites and skipped places of each pass.")
@without_option
@seed_option
@json_option
def export_command(source: str, out: str, passes: str, trace: bool, wants_json: bool, **options: Any) -> None:
    """Write SOURCE, rewritten or not, as a checkpoint of another library.

    hf: a folder for transformers. gguf: a file for llama.cpp. For both, weft searches for a family with the same graph,
    and fails if there is none. safetensors: the parameters of any graph, under their names in the graph.

    \b
    Examples:
      weft export model.gguf -o folder/
      weft export model.gguf -p "mha-to-gqa{kv_heads=1}" --dtype bf16 -o smaller/
      weft export smaller/ --dtype q8_0 -o smaller.gguf
      weft export ./Qwen3-0.6B --adapter ./my-lora -o merged/
      weft export model.py -o weights.safetensors
    """
    from weft.passes import Report

    from ..api.export import export

    report, notes, start = Report(priced=trace), list[str](), time.perf_counter()
    with show_progress(f"reading {source}") as step:
        family = export(source, out, passes=passes, report=report, progress=step, note=notes.append, **options)
    report_passes(report, passes, trace)
    for line in notes:
        print_note(line)
    if family:
        print_note(f"{out} is a {family} model")
    if wants_json:
        seconds = {"all": time.perf_counter() - start}
        print_written(out, report, notes, seconds, ("numpy", "safetensors"), source=source, family=family)

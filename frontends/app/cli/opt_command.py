"""`weft opt`."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weft.ir.errors import WeftError
from weft.ir.storage import check_replaceable, replace_file

from .compile_command import FOLDER
from .completion import complete_sources
from .options import adapter_option, add_passes_option, without_option
from .passes_command import print_passes
from .terminal import echo, json_option, print_note, print_written, show_progress

if TYPE_CHECKING:
    from weft.ir import Graph
    from weft.passes import Report

    from ...model import Model


def _print_list(ctx: click.Context, _: click.Parameter, requested: bool) -> None:
    if requested and not ctx.resilient_parsing:
        print_passes()
        ctx.exit()


@click.command("opt", short_help="Rewrite a graph: print it, or write the model.")
@click.argument("source", shell_complete=complete_sources)
@add_passes_option(
    "The pipeline of passes, or @FILE that contains it; default: none, the graph is unchanged.", default=""
)
@click.option(
    "-o",
    "--out",
    default="-",
    show_default=True,
    type=click.Path(),
    help="Where to write: a .weft file for the text of the graph, - for the text on stdout, or a folder for a model.",
)
@click.option("--dtype", help="dtype of the weights in a folder: f32, f16 or bf16; default: no rounding.")
@adapter_option
@without_option
@click.option("--dump-ir", type=FOLDER, help="Write the graph before and after every pass into this folder, as text.")
@click.option(
    "--viz", type=click.Path(path_type=Path), help="Draw the graph before and after every pass on this page (.html)."
)
@click.option(
    "--verify", is_flag=True, help="Check every pass on small random inputs in float64, and report each check."
)
@click.option("--trace", is_flag=True, help="Report on stderr for each pass: rewrites, skipped places, costs, time.")
@click.option(
    "--list", "listing", is_flag=True, is_eager=True, expose_value=False, callback=_print_list, help="List the passes."
)
@json_option
def opt_command(
    source: str,
    passes: str,
    out: str,
    dtype: str | None,
    adapters: tuple[str, ...],
    without: tuple[str, ...],
    dump_ir: str | None,
    viz: Path | None,
    verify: bool,
    trace: bool,
    wants_json: bool,
) -> None:
    """Run a pipeline of passes on the graph of SOURCE, and write the result. With SOURCE -, read a graph from stdin.

    A folder is a complete model, which every command accepts as a SOURCE. A .weft file has no weights; it refers to the
    checkpoint of SOURCE.

    \b
    Examples:
      weft opt model.gguf                                     the graph as it is read
      weft opt model.gguf -p "pack-qkv,pack-gate-up,dce"      rewritten
      weft opt model.gguf -p @smaller.pipeline -o smaller/    with its weights
      weft opt model.py -p default --verify --trace -o optimized.weft
      weft opt model.py -p default --verify -o optimized.weft --viz steps.html
      weft opt a.weft -p cse | weft opt - -p dce
    """
    from weft.passes import Report
    from weft.passes.core.resume import choose_store, remove_results

    from ... import load_source
    from ..api.rewrite import rewrite

    folder = _is_folder(out)
    if dtype is not None and not folder:
        raise WeftError("--dtype is the dtype of the weights in a folder; name a folder with -o")
    if without and not folder:
        raise WeftError("--without needs a folder to write; name a folder with -o")
    if folder:
        check_replaceable(Path(out))
    drawing: Any = None
    if viz is not None:
        from ..api.draw import comparing as drawing  # importing it takes longer than most pipelines run

        drawing.check_html_suffix(viz)
    report, start = Report(priced=trace), time.perf_counter()
    with show_progress(f"reading {source}", "steps") as step:
        piped = source == "-"
        model = _read_stdin(folder, adapters) if piped else load_source(source, adapters=adapters, without=without)
        notices = model.notices(strict=bool(folder))
        steps = drawing.PipelineGraphs(model) if drawing is not None else None
        hooks = [steps.record_pass] if steps else []
        options: dict[str, Any] = {"verify": verify, "dump": dump_ir, "store": choose_store(out) if folder else None}
        model = rewrite(model, passes, report=report, hooks=hooks, progress=step, **options)
    for line in notices:
        print_note(line)
    report_passes(report, passes, trace)
    if steps and viz is not None:
        steps.write_page(report, viz)
        print_note(f"{viz} written")
    if folder:
        from ...formats.weft.model_folder import write_model

        with show_progress(f"reading {source}") as step:
            write_model(model, out, dtype=dtype, progress=step)
        remove_results(choose_store(out))
    text = "" if folder else _to_text(model.graph)
    if not folder and out != "-":
        with replace_file(Path(out), model.files) as partial:
            partial.write_text(text, encoding="utf-8")
    if wants_json:
        seconds, facts = {"all": time.perf_counter() - start}, dict[str, Any](graph=text) if out == "-" else {}
        facts |= {"source": model.description, "pipeline": model.pipeline, "nodes": len(model.graph)}
        print_written(out, report, notices, seconds, ("numpy",), **facts)
    elif out == "-":
        echo(text.removesuffix("\n"))


def report_passes(report: Report, passes: str, trace: bool) -> None:
    """Print all records to stderr if `trace`, else warnings, checks, and passes of `passes` without effect."""
    from ..api.rewrite import resolve_pipeline

    if trace and report.records:
        echo(str(report), err=True)
        return
    names = re.findall(r"[\w.-]+", resolve_pipeline(passes))
    for record in report.records:
        for line in record.warnings:
            print_note(line)
        if record.idle and record.applied.name in names:
            print_note(record.idle)
        elif record.evidence:
            print_note(f"{record.applied} ({record.applied.effect}): {record.evidence}")


def _is_folder(out: str) -> bool:
    """Return whether `out` names a folder: anything except a .weft file, a device or a pipe."""
    path = Path(out)
    if out == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
        return False
    return out.endswith(os.sep) or path.is_dir() or Path(os.path.realpath(path)).suffix != ".weft"


def _read_stdin(complete: bool, adapters: Sequence[str]) -> Model:
    from weft.ir.storage.documents import decode_utf8
    from weft.ir.text.parser import MOST_BYTES

    from ...model import Model
    from ..api.source.sources import parse_graph

    if adapters:
        raise WeftError("--adapter needs a Hugging Face folder, not IR text on stdin")
    text = decode_utf8(sys.stdin.buffer.read(MOST_BYTES), "<stdin>")
    return Model(parse_graph(text, "<stdin>", complete), "-", "IR text on stdin")


def _to_text(graph: Graph) -> str:
    from weft.ir.recipes.readers import SpilledTensors

    reader, computed = graph.reader, set[str]()
    while isinstance(reader, SpilledTensors):
        computed.update(reader.computed_keys)
        reader = reader.base
    for param in graph.params.values():
        if not computed.isdisjoint(param.recipe.sources()):
            raise WeftError(f"a pass computed {param.name}, which IR text cannot store; use a folder: -o {graph.name}/")
    return str(graph)

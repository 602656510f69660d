"""`weft opt`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

from weft.backends.folder import reason, umask
from weft.ir.errors import WeftError

from .compiling import FOLDER
from .completion import complete_pipelines, complete_sources


@click.command("opt", short_help="Rewrite a graph and print it.")
@click.argument("source", shell_complete=complete_sources)
@click.option(
    "-p", "--passes", default="", shell_complete=complete_pipelines, help="The pipeline; without one nothing changes."
)
@click.option("-o", "--out", default="-", show_default=True, type=click.Path(), help="The file to write; - is stdout.")
@click.option("--dump-ir", type=FOLDER, help="Write the graph after every pass into this folder.")
@click.option("--verify", is_flag=True, help="Check every pass on small random inputs in float64, and name what broke.")
@click.option("--trace", is_flag=True, help="Tell on stderr what fired where, and what stopped what did not.")
def opt_command(source: str, passes: str, out: str, dump_ir: str | None, verify: bool, trace: bool) -> None:
    """Run a pipeline of passes on the graph of SOURCE, and write the result as text. SOURCE - is such text on stdin.

    \b
    Examples:
      weft opt model.gguf                                     the graph as it is read
      weft opt model.gguf -p "pack-qkv,pack-gate-up,dce"      rewritten
      weft opt model.py -p default --verify --trace -o optimized.weft
      weft opt a.weft -p cse | weft opt - -p dce
    """
    from weft.ir import parse
    from weft.ir import verify as check
    from weft.passes import Report, run_passes

    from .. import load_source

    if source == "-":
        graph = parse(sys.stdin.read(), "<stdin>")
        check(graph)
    else:
        graph = load_source(source).graph
    if passes.strip():
        report = Report()
        graph = run_passes(graph, passes, verify=verify, dump=dump_ir, report=report)
        if trace:
            click.echo(str(report), err=True)
    text = str(graph)
    if out == "-":
        sys.stdout.write(text)
    else:
        _write(Path(out), text)


def _write(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all; what is no plain file (a device, a pipe) is written into.

    Raises:
        WeftError: if `path` is a folder, or the system refuses.
    """
    if path.is_dir():
        raise WeftError(f"{path} is a folder; name the file to write the graph into")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()  # a link stays one
        handle, partial = tempfile.mkstemp(prefix=f".{path.name}.partial-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as f:
                f.write(text)
            Path(partial).chmod(0o666 & ~umask())
            Path(partial).replace(path)
        finally:
            Path(partial).unlink(missing_ok=True)
    except OSError as e:
        raise WeftError(f"cannot write to {path}: {reason(e)}") from e

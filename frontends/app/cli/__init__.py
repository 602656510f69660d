"""The command `weft`: compile, run, serve, eval, export, inspect, viz, gallery, opt, train, distil, verify, bisect.

Importing it only imports click; each command imports its needs when it runs. Never here: anything that Python callers
also need, which is in `weft.frontends.app.api`.
"""

from __future__ import annotations

import gc

import click

from weft.ir.registry import import_plugin

from . import bisect_command as bisecting
from . import catalog_commands as catalog
from . import certificate_command as certifying
from . import compare_command as comparing
from . import compile_command as compiling
from . import completion
from . import distil_command as distilling
from . import eval_command as evaluating
from . import export_command as exporting
from . import inspect_command as inspecting
from . import opt_command as opting
from . import passes_command as passes_catalog
from . import run_command as running
from . import serve_command as serving
from . import train_command as training
from . import verify_command as verifying
from . import viz_command as drawing
from .guard import Root
from .terminal import echo

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


def _print_version(ctx: click.Context, _: click.Parameter, requested: bool) -> None:
    if requested and not ctx.resilient_parsing:
        from weft import __version__

        echo(f"weft {__version__}")
        ctx.exit()


def _import_plugins(ctx: click.Context, _: click.Parameter, modules: tuple[str, ...]) -> None:
    for name in modules:
        import_plugin(name)


@click.group("weft", cls=Root, context_settings=HELP, invoke_without_command=True)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Print the version."
)
@click.option(
    "--import",
    "modules",
    multiple=True,
    expose_value=False,
    is_eager=True,
    callback=_import_plugins,
    metavar="MODULE",
    help="Import a module that adds ops, passes, families, targets.",
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Compile transformers to ONNX or PyTorch, and run them.

    SOURCE is an architecture file (`model.py` or `model.py:name`), a preset, a Hugging Face folder, a `.gguf` file, or
    the text form of a graph.

    \b
    Examples:
      weft compile model.gguf -o out/           a folder that ONNX Runtime runs
      weft run out/ --chat                      talk to it
      weft serve out/                           answer requests of OpenAI's API
      weft inspect model.gguf                   parameters, FLOPs, cache bytes, a line per distinct block
      weft viz model.gguf -o model.html         a picture to click through
      weft gallery                              a page with all presets
      weft opt model.gguf -p pack-qkv,dce       rewrite, and print the graph
      weft train model.py --text book.txt -o run/             train an architecture
      weft distil q4/ --against model.gguf -o run/            train a rewritten model to predict as the original
      weft export model.gguf -o folder/         a checkpoint that transformers loads
      weft verify out/                          compare with the float64 reference of the source
      weft bisect model.gguf out/               find the first operation that differs, and how
      weft eval out/ --against model.gguf --text notes.txt    the loss of quality
      weft certificate out/                     its record: sources, passes, measurements; checked again
    """
    if ctx.invoked_subcommand is None:
        echo(ctx.get_help())


COMMANDS = {  # in the groups of `weft --help`
    "Build": (compiling.compile_command, exporting.export_command),
    "Run": (running.run_command, serving.serve_command, evaluating.eval_command),
    "Look": (
        inspecting.inspect_command,
        drawing.viz_command,
        drawing.gallery_command,
        catalog.presets_command,
        catalog.families_command,
        catalog.ops_command,
        catalog.targets_command,
        passes_catalog.passes_command,
    ),
    "Train": (training.train_command, distilling.distil_command, comparing.compare_command),
    "Change": (opting.opt_command,),
    "Trust": (verifying.verify_command, bisecting.bisect_command, certifying.certificate_command),
    "Shell": (completion.completion_command,),
}
for group, commands in COMMANDS.items():
    for command in commands:
        cli.add_to(group, command)
cli.add_command(distilling.distil_command, "heal")  # its earlier name, for one version


def main() -> None:
    """Run the command line, and end the process with its exit status."""
    gc.set_threshold(50_000, 20, 20)  # most objects of a command live until it ends, so collections free little
    cli.main(prog_name="weft")

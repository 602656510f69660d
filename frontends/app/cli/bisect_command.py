"""`weft bisect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .completion import complete_sources
from .options import parse_token_ids
from .terminal import echo, format_json, print_note, show_progress
from .verify_command import DIFFERENT

if TYPE_CHECKING:
    from ..api.bisect.bisection import Bisection


@click.command("bisect", short_help="Find where two models first differ, and how.")
@click.argument("a", shell_complete=complete_sources)
@click.argument("b", shell_complete=complete_sources)
@click.option("--prompt", help="The text that both read; default: a built-in sentence.")
@click.option("--ids", callback=parse_token_ids, metavar="1,2,3", help="Token ids instead of a text.")
@click.option("--viz", metavar="FILE.html", help="Also write a page with both models and the place marked.")
@click.option(
    "--trust", is_flag=True, help="Run the code that a compiled folder names: model.py, an architecture file."
)
@click.option("--json", "wants_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def bisect_command(ctx: click.Context, /, wants_json: bool, **options: Any) -> None:
    """Run the models A and B on the same tokens, and name the first operation whose results differ beyond rounding.

    Each is a SOURCE (float64 interpreter), a compiled folder, an .onnx file of any exporter, transformers:FOLDER,
    optimized:FOLDER (after ONNX Runtime's optimizer), torch:SOURCE or llama.cpp:FILE.gguf (outputs only). weft tries
    changes of the operation (attributes, operands, weights) until both agree. Exit status 1 if they differ.

    \b
    Examples:
      weft bisect ./Qwen3-0.6B out/
      weft bisect transformers:./Qwen3-0.6B theirs/model.onnx
      weft bisect out/ optimized:out/
      weft bisect model.gguf llama.cpp:model.gguf
      weft bisect ./Qwen3-0.6B out/ --viz place.html
    """
    from ..api.bisect.bisection import bisect

    with show_progress("opening", "steps") as step:
        bisection = bisect(options.pop("a"), options.pop("b"), progress=step, **options)
    if options["viz"] is not None:
        print_note(f"{options['viz']} written")
    echo(format_json(bisection.json()) if wants_json else _format_bisection(bisection))
    if bisection.differs:
        ctx.exit(DIFFERENT)


def _format_bisection(bisection: Bisection) -> str:
    from ..api.inspect.inspection import align_pairs

    rows = [("A", bisection.a), ("B", bisection.b), ("tokens", str(len(bisection.tokens)))]
    rows += [(f"error of {name}", f"{error:.3g}") for name, error in bisection.errors.items()]
    rows.append(("tolerance", f"{bisection.tolerance:.2g}"))
    if (difference := bisection.difference) is not None:
        rows.append(("first difference", f"{difference.values[0]}, relative error {difference.error:.3g}"))
        for side, place, value in zip("AB", difference.places, difference.values, strict=True):
            rows.append((f"  in {side}", f"{place.op} {place.name}" + (f" -> {value}" if value != place.name else "")))
        rows.append(("kind", difference.kind))
        rows += [("how", text) for text in difference.describe()]
    only = " (only outputs were compared)" if bisection.outputs_only else ""
    unknown = ": no values inside correspond" if difference is None and not only else ""
    return "\n".join(align_pairs(rows)) + (f"\nDIFFERENT{only}{unknown}" if bisection.differs else f"\nequal{only}")

"""`weft inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from .completion import complete_sources
from .options import adapter_option
from .shown import count, echo, size, table

if TYPE_CHECKING:
    from ..api.inspect.breakdown import PartCost
    from ..api.inspect.inspection import Inspection

DTYPES = {"f32": 4, "f16": 2, "bf16": 2}  # bytes of a number


@click.command("inspect", short_help="Parameters, FLOPs, cache bytes, blocks.")
@click.argument("source", shell_complete=complete_sources)
@click.option("--tokens", type=click.IntRange(1), help="Tokens to count FLOPs for; default: 512, or the context.")
@click.option("--parts", is_flag=True, help="Add one line per part: FLOPs and bytes of a prefill and of a decode step.")
@click.option(
    "--dtype",
    type=click.Choice(sorted(DTYPES)),
    default="f16",
    show_default=True,
    help="dtype for the byte counts of parts.",
)
@adapter_option
@click.option("--json", "as_json", is_flag=True, help="The same as JSON, parts included.")
def inspect_command(
    source: str, tokens: int | None, parts: bool, dtype: str, adapters: tuple[str, ...], as_json: bool
) -> None:
    """Count parameters, FLOPs and cache sizes of SOURCE without compiling it.

    Also print one line per distinct block, and the unused checkpoint tensors.

    \b
    Examples:
      weft inspect model.gguf
      weft inspect llama3.1-8b --tokens 8192
      weft inspect mixtral-8x7b --parts --dtype bf16
      weft inspect ./Qwen3-0.6B --json | jq .parameters
    """
    import json

    from .. import load_source
    from ..api.inspect.breakdown import breakdown
    from ..api.inspect.counting import inspect

    model = load_source(source, adapters=adapters)
    inspection = inspect(model, tokens)
    costs = breakdown(model.graph, inspection.tokens, DTYPES[dtype]) if parts or as_json else ()
    if as_json:
        document = {**inspection.json(), "dtype": dtype, "parts": [asdict(cost) for cost in costs]}
        echo(json.dumps(document, indent=2))
        return
    _show(inspection)
    if parts:
        _show_parts(costs, inspection.tokens, dtype)


def _show(inspection: Inspection) -> None:
    from ..api.inspect.inspection import COLUMNS, NUMERIC, facts, named_lines, remarks, rows

    echo("\n".join([*named_lines(facts(inspection)), ""]))
    table(COLUMNS, rows(inspection), right=" ".join(NUMERIC))
    for title, keys in remarks(inspection):
        echo("\n".join(["", f"{title}:", *(f"  {key}" for key in keys)]))


def _show_parts(costs: Sequence[PartCost], tokens: int, dtype: str) -> None:
    """Print one line per part: FLOPs and bytes of a prefill and of a decode step."""
    steps = any(cost.step_flops is not None for cost in costs)
    columns = ["part", "", "times", "parameters", "FLOPs", "read", "written"]
    columns += ["+FLOPs", "+read", "+written", "kept"] if steps else []
    rows = []
    for cost in costs:
        row = [cost.path or "all", cost.title, f"× {cost.times}" if cost.times > 1 else "", count(cost.parameters)]
        row += [count(cost.flops), size(cost.read), size(cost.written)]
        if steps:
            row += [count(cost.step_flops or 0), size(cost.step_read or 0), size(cost.step_written or 0)]
            row.append(size(cost.cache + cost.state) if cost.cache + cost.state else "")
        rows.append(row)
    measure = f"{tokens} tokens in {dtype}"
    echo(f"\nparts: {measure}{'; with +, of one decode step, the last of these tokens' if steps else ''}")
    table(columns, rows, right=" ".join(columns[2:]))

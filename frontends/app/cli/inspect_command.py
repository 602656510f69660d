"""`weft inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from weft.backends import DEFAULT_TARGET

from .completion import complete_sources
from .options import adapter_option, default_option, target_option
from .terminal import echo, format_bytes, format_count, print_note, print_table

if TYPE_CHECKING:
    from weft.backends.torch.transformers.scale.estimate import ParallelCosts

    from ..api.inspect.counting import PartCost
    from ..api.inspect.inspection import Inspection
    from ..api.inspect.weight_sizes import WeightSizes

DTYPES = {"f32": 4, "f16": 2, "bf16": 2}  # bytes of a number


@click.command("inspect", short_help="Parameters, FLOPs, cache bytes, blocks.")
@click.argument("source", shell_complete=complete_sources)
@click.option(
    "--tokens", type=click.IntRange(1), help="Tokens to count FLOPs for; default: 512, or the context if shorter."
)
@click.option("--parts", is_flag=True, help="Add one line per part: FLOPs and bytes of a prefill and of a decode step.")
@default_option(
    "--dtype",
    "f16",
    "dtype for the byte counts of parts, and of weights that --weights does not quantize.",
    type=click.Choice(sorted(DTYPES)),
)
@click.option(
    "--weights",
    metavar="WEIGHTS",
    help='Add the size of the weights after `weft compile --weights WEIGHTS`: int4, "int4{group=64}", …',
)
@target_option("The target of --weights: {targets}.", default=DEFAULT_TARGET, show_default=True)
@click.option(
    "--parallel",
    metavar="DEGREES",
    help="Add memory and traffic of devices that share the model: tp=8,ep=8,pp=2; with pp also microbatches=8.",
)
@adapter_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, including parts.")
@click.pass_context
def inspect_command(
    ctx: click.Context,
    /,
    source: str,
    tokens: int | None,
    parts: bool,
    dtype: str,
    weights: str | None,
    target: str,
    parallel: str | None,
    adapters: tuple[str, ...],
    as_json: bool,
) -> None:
    """Count parameters, FLOPs and cache sizes of SOURCE without compiling it.

    Also print one line per distinct block, and the parts of the source that are left out. Without --dtype,
    --weights uses the target's default. --parallel divides the model as folders of target transformers do: tp devices
    share each linear layer, ep devices share the experts, and pp devices share the layers.

    \b
    Examples:
      weft inspect model.gguf
      weft inspect llama3.1-8b --tokens 8192
      weft inspect mixtral-8x7b --parts --dtype bf16
      weft inspect ./Qwen3-0.6B --weights "int4{group=64}"
      weft inspect deepseek-v3 --parallel tp=8,ep=8,pp=2 --dtype bf16
      weft inspect ./Qwen3-0.6B --json | jq .parameters
    """
    import json

    from ... import load_source
    from ..api.inspect.counting import compute_part_costs, inspect
    from ..api.inspect.parallel import estimate_parallel as divide
    from ..api.inspect.weight_sizes import compute_weight_sizes

    model = load_source(source, adapters=adapters)
    for line in model.list_residual_notes():
        print_note(line)
    inspection = inspect(model, tokens)
    costs = compute_part_costs(model.graph, inspection.tokens, DTYPES[dtype]) if parts or as_json else ()
    has_dtype = ctx.get_parameter_source("dtype") is not ParameterSource.DEFAULT
    sizes = compute_weight_sizes(model, weights, target, dtype if has_dtype else None) if weights else None
    parallel_costs = divide(model, parallel, inspection.tokens, dtype) if parallel else None
    if as_json:
        document = {**inspection.json(), "dtype": dtype, "parts": [asdict(cost) for cost in costs]}
        if sizes is not None:
            document["weights"] = sizes.json()
        if parallel_costs is not None:
            document["parallel"] = parallel_costs.json()
        echo(json.dumps(document, indent=2))
        return
    _print_inspection(inspection)
    if sizes is not None:
        _print_sizes(sizes)
    if parallel_costs is not None:
        _print_parallel(parallel_costs)
    if parts:
        _print_parts(costs, inspection.tokens, dtype)


def _print_sizes(sizes: WeightSizes) -> None:
    """Print the bytes and bits per value of each kind of weight, with scales and zero points."""
    from weft.backends.weights import OTHER

    echo(f"\nweights as {sizes.weights} for {sizes.target} in {sizes.dtype}")
    rows = [
        (kind, format_count(part["numbers"]), format_bytes(part["bytes"]), _format_bits(part) if kind != OTHER else "")
        for kind, part in sizes.kinds.items()
    ]
    total = {"numbers": sum(part["numbers"] for part in sizes.kinds.values()), "bytes": sizes.total}
    rows.append(("total", format_count(total["numbers"]), format_bytes(total["bytes"]), _format_bits(total)))
    print_table(("kind", "numbers", "bytes", "bits/weight"), rows, right="numbers bytes bits/weight")
    if sizes.blocks:
        echo(f"blocks: {', '.join(f'{n} as {layout}' for layout, n in sizes.blocks.items())}")
    else:
        echo(f"target {sizes.target} keeps no blocks of this model: it stores dequantized values")


def _print_parallel(costs: ParallelCosts) -> None:
    from ..api.inspect.parallel import DEVICES, TRAFFIC, list_device_rows, list_traffic_rows, summarize_split

    echo(f"\n{summarize_split(costs)}")
    print_table(DEVICES, list_device_rows(costs), right=" ".join(DEVICES[2:]))
    if costs.collectives:
        echo()
        print_table(TRAFFIC, list_traffic_rows(costs), right="times message bytes/token sent/token")


def _print_inspection(inspection: Inspection) -> None:
    from ..api.inspect.inspection import COLUMNS, NUMERIC, align_pairs, list_facts, list_remarks, list_rows

    echo("\n".join([*align_pairs(list_facts(inspection)), ""]))
    print_table(COLUMNS, list_rows(inspection), right=" ".join(NUMERIC))
    for title, keys in list_remarks(inspection):
        echo("\n".join(["", f"{title}:", *(f"  {key}" for key in keys)]))


def _format_bits(part: Mapping[str, int]) -> str:
    return f"{8 * part['bytes'] / max(part['numbers'], 1):.2f}"


def _print_parts(costs: Sequence[PartCost], tokens: int, dtype: str) -> None:
    steps = any(cost.step_flops is not None for cost in costs)
    columns = ["part", "", "times", "parameters", "FLOPs", "read", "written"]
    columns += ["+FLOPs", "+read", "+written", "kept"] if steps else []
    rows = []
    for cost in costs:
        row = [cost.path or "all", cost.title, f"× {cost.times}" if cost.times > 1 else ""]
        row += [format_count(cost.parameters), format_count(cost.flops)]
        row += [format_bytes(cost.read), format_bytes(cost.written)]
        if steps:
            row += [format_count(cost.step_flops or 0)]
            row += [format_bytes(cost.step_read or 0), format_bytes(cost.step_written or 0)]
            row.append(format_bytes(cost.cache + cost.state) if cost.cache + cost.state else "")
        rows.append(row)
    measure = f"{tokens} tokens in {dtype}"
    echo(f"\nparts: {measure}{'; with +, of one decode step, the last of these tokens' if steps else ''}")
    print_table(columns, rows, right=" ".join(columns[2:]))

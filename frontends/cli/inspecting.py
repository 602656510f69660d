"""`weft inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING

import click

from .completion import complete_sources
from .options import adapter_option
from .shown import count, echo, size, table

if TYPE_CHECKING:
    from ..breakdown import PartCost
    from ..inspection import Inspection

DTYPES = {"f32": 4, "f16": 2, "bf16": 2}  # bytes of a number


@click.command("inspect", short_help="Parameters, FLOPs, cache bytes, blocks.")
@click.argument("source", shell_complete=complete_sources)
@click.option("--tokens", type=click.IntRange(1), help="Tokens to count FLOPs for; default: 512, or the context.")
@click.option("--parts", is_flag=True, help="A line per part of the picture too: work and bytes of a text and a token.")
@click.option(
    "--dtype",
    type=click.Choice(sorted(DTYPES)),
    default="f16",
    show_default=True,
    help="Of numbers, for bytes of parts.",
)
@adapter_option
@click.option("--json", "as_json", is_flag=True, help="The same as JSON, parts included.")
def inspect_command(
    source: str, tokens: int | None, parts: bool, dtype: str, adapters: tuple[str, ...], as_json: bool
) -> None:
    """Tell what SOURCE is and costs, without compiling it: a line per distinct block, checkpoint keys nothing reads.

    \b
    Examples:
      weft inspect model.gguf
      weft inspect llama3.1-8b --tokens 8192
      weft inspect mixtral-8x7b --parts --dtype bf16
      weft inspect ./Qwen3-0.6B --json | jq .parameters
    """
    import json

    from .. import load_source
    from ..breakdown import breakdown
    from ..inspection import inspect

    model = load_source(source, adapters=adapters)
    found = inspect(model, tokens)
    costs = breakdown(model.graph, found.tokens, DTYPES[dtype]) if parts or as_json else ()
    if as_json:
        told = {**found.json(), "dtype": dtype, "parts": [asdict(cost) for cost in costs]}
        echo(json.dumps(told, indent=2))
        return
    _show(found)
    if parts:
        _show_parts(costs, found.tokens, dtype)


def _show(found: Inspection) -> None:
    from ..inspection import CACHE_DTYPES

    stored = ", ".join(f"{count(n)} as {dtype}" for dtype, n in found.parameters_by_storage.items())
    facts = [
        ("model", found.source + _kind(found)),
        ("parameters", f"{found.parameters:,} ({stored}{'; random, no checkpoint' if found.random else ''})"),
        *_active(found),
        ("layers", str(found.layers)),
        ("vocabulary", f"{found.vocab:,}" if found.vocab else "none"),
        ("context", f"{found.context:,} tokens" if found.context else "not stated"),
        ("FLOPs per token", f"{count(found.flops_per_token)} (seeing {found.tokens} tokens)"),
        ("FLOPs of a prefill", f"{count(found.flops_prefill)} ({found.tokens} tokens)"),
    ]
    caches = {
        "cache per token": found.cache_per_token,
        "cache of the context": found.cache_at_context,
        "cache per source token": found.cache_per_source_token,
    }
    kept = {what: {d: (numbers or 0) * b for d, b in CACHE_DTYPES.items()} for what, numbers in caches.items()}
    for what, taken in {**kept, "constant state": found.state_bytes or {}}.items():
        if any(taken.values()):
            facts.append((what, ", ".join(f"{size(b)} in {d}" for d, b in taken.items())))
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        echo(f"{name:<{width}}  {value}")
    echo()
    rows = [
        (
            ranges(b.scopes),
            f"× {len(b.scopes)}" if len(b.scopes) > 1 else "",
            count(b.parameters),
            count(b.flops),
            count(b.cache) if b.cache else "",
            ", ".join(b.ops),
        )
        for b in found.blocks
    ]
    columns = ("block", "times", "parameters", "FLOPs/token", "cache", "ops")
    table(columns, rows, right="times parameters FLOPs/token cache")
    for title, keys in (("that nothing reads", found.unread), ("known to be of no use", found.ignored)):
        if keys:
            echo("\n".join(["", f"checkpoint keys {title}:", *(f"  {key}" for key in keys)]))


def _show_parts(costs: Sequence[PartCost], tokens: int, dtype: str) -> None:
    """A line per part: work and bytes of all tokens at once, and of one more token."""
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
    told = f"{tokens} tokens in {dtype}"
    echo(f"\nparts: {told}{'; with +, of one more token that is the last of as many' if steps else ''}")
    table(columns, rows, right=" ".join(columns[2:]))


def _active(found: Inspection) -> list[tuple[str, str]]:
    """A line for models that use some of their parameters only."""
    if found.active_parameters == found.parameters:
        return []
    return [("active", f"{found.active_parameters:,} per token ({count(found.active_parameters)})")]


def _kind(found: Inspection) -> str:
    named = f"{found.model_type} " if found.model_type and found.model_type not in found.source else ""
    return f": {named}{found.kind}"


def ranges(scopes: tuple[str, ...]) -> str:
    """layers.0, layers.1, layers.2, layers.5 as layers.0-2,5."""
    stem, _, first = scopes[0].rpartition(".")
    if not first.isdigit():
        return ", ".join(scopes)
    numbers = [int(s.rpartition(".")[2]) for s in scopes]
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    spelled = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"{stem}.{','.join(spelled)}"

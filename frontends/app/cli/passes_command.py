"""`weft passes`, and the list that `weft opt --list` prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .catalog_commands import get_first_sentence
from .completion import complete_passes
from .terminal import echo, print_note, print_table

if TYPE_CHECKING:
    from weft.passes import Pass


@click.command("passes", short_help="List the passes.")
@click.argument("name", required=False, shell_complete=complete_passes)
@click.option("--write-docs", type=click.Path(file_okay=False), help="Write a page for every pass into this folder.")
def passes_command(name: str | None, write_docs: str | None) -> None:
    """List the passes and the default pipelines, or describe one pass.

    A pass is exact (equal outputs), conditional (equal outputs under a condition that it names), lossy (nearly equal
    outputs) or changing (different outputs).

    \b
    Examples:
      weft passes                          all of them, by purpose
      weft passes kv-cache                 effect, condition, arguments, reference, example
      weft passes --write-docs pages/      one page per pass, with the example before and after
    """
    if write_docs is not None:
        from ..api.pass_pages import write_pages

        print_note(f"{write_docs}: {write_pages(Path(write_docs))} pages")
    elif name is None:
        print_passes()
    else:
        from weft.passes import lookup

        _print_pass(lookup(name))


def print_passes() -> None:
    """Print every pass with its effect, summary, arguments, condition and trade-off, then the default pipelines."""
    from weft.ir import Graph
    from weft.passes import all_passes, default_pipeline
    from weft.passes.core.pipeline import PIPELINES

    from ..api.pass_pages import format_signature, group_by_purpose

    rows: list[tuple[str, str, str]] = []
    for purpose, names in group_by_purpose().items():
        rows.append((purpose.upper(), "", ""))
        for pass_type in (all_passes()[name] for name in names):
            parts = pass_type.documentation()
            notes = {
                "arguments": format_signature(pass_type),
                "condition": get_first_sentence(parts.condition),
                "trade-off": get_first_sentence(pass_type.tradeoff),
            }
            lines = [get_first_sentence(parts.summary), *(f"{title}: {text}" for title, text in notes.items() if text)]
            rows.append((pass_type.name, pass_type.effect, "\n".join(lines)))
    print_table(("pass", "effect", "what it does"), rows)
    for kind in ("decoder", "encoder"):
        graph = Graph()
        graph.meta["kind"] = kind
        echo(f"\ndefault, of {kind}s: {default_pipeline(graph)}")
    for name, pipeline in PIPELINES.items():
        echo(f"\n{name}: {pipeline}")


def _print_pass(pass_type: type[Pass]) -> None:
    from weft.ir.recipes.spelling import spell

    parts = pass_type.documentation()
    echo(f"{pass_type.name} ({pass_type.effect})\n\n{parts.summary}")
    sections = {
        "": parts.text,
        "Condition: ": parts.condition,
        "Trade-off: ": pass_type.tradeoff,
        "Source: ": parts.source,
    }
    for title, text in sections.items():
        if text:
            echo(f"\n{title}{text}")
    if arguments := pass_type.arguments():
        echo()
        rows = [(a.name, a.type_text, "" if a.required else spell(a.default)) for a in arguments]
        print_table(("argument", "type", "default"), rows)
    if parts.pipeline:
        echo(f"\nExample: {parts.pipeline}\n\n{parts.graph.rstrip()}")

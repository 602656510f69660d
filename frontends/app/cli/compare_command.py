"""`weft compare`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..api.training.training_settings import TrainingSettings
from .completion import complete_sources
from .options import add_options, default_option, device_option, settings_options, take_settings
from .terminal import echo, format_bytes, format_count, format_json, print_note, print_table, show_progress
from .train_command import TEXT_OPTIONS

if TYPE_CHECKING:
    from ..api.training.compare import Point, TrainedVariant


@click.command("compare", short_help="Train variants of an architecture side by side.")
@click.argument("sources", nargs=-1, required=True, shell_complete=complete_sources, metavar="SOURCE SOURCE...")
@add_options(*TEXT_OPTIONS)
@click.option("--flops", type=float, help="FLOPs of the training of each variant, such as 1e15, instead of --steps.")
@default_option("--seeds", 3, "Runs of each variant, each with other weights and another order of the text.")
@click.option(
    "--match-parameters", is_flag=True, help="Change the feed-forward widths of the others to equal the first's size."
)
@settings_options(TrainingSettings)
@click.option("--plot", type=click.Path(dir_okay=False), metavar="FILE", help="Draw the curves: .svg, .png or .pdf.")
@default_option("--theme", "light", "The colours of the chart.", type=click.Choice(["light", "dark"]))
@device_option
@click.option("--json", "wants_json", is_flag=True, help="Print the result as JSON.")
def compare_command(
    sources: tuple[str, ...], text: tuple[str, ...], plot: str | None, theme: str, wants_json: bool, **options: Any
) -> None:
    """Train each SOURCE, an architecture, on the same text with the same settings; print the loss on held-out text.

    Variants are compared at equal tokens (--steps, --tokens) or at equal compute (--flops). Their steps alternate, so
    that other load on the machine affects all alike.

    \b
    Examples:
      weft compare gpt.py gqa.py --text book.txt --tokens 2000000
      weft compare gpt.py mamba.py --text book.txt --flops 1e15 --seeds 5 --plot curves.svg
      weft compare gpt.py moe.py --text book.txt --match-parameters --steps 500
    """
    from weft.backends.viz.formats.chart import check_chart

    from ..api.training.compare import compare, draw_comparison

    if not text:
        raise click.UsageError("a comparison needs a text to train on: --text FILE")
    if plot is not None:
        check_chart(Path(plot))
    settings = TrainingSettings(**take_settings(TrainingSettings, options))
    with show_progress("opening", "steps") as step:

        def report(name: str, seed: int, done: float, point: Point) -> None:
            step(f"seed {seed}", round(1000 * done), 1000)
            if done >= 1 and not wants_json:
                echo(f"{name}  seed {seed}  {point.tokens:,} tokens  loss {point.loss:.4f}")

        variants = compare(sources, text, settings, report=report, progress=step, **options)
    if plot is not None:
        draw_comparison(variants, Path(plot), theme == "dark")
        print_note(f"{plot} written")
    if wants_json:
        rows = [asdict(variant) | {"losses": variant.losses, "spread": variant.spread} for variant in variants]
        echo(format_json({"variants": rows}))
    else:
        _print_variants(variants)


def _print_variants(variants: list[TrainedVariant]) -> None:
    columns = ("variant", "parameters", "FLOPs/token", "cache/token", "tokens", "FLOPs", "seconds", "loss", "±")
    rows = []
    for variant in variants:
        ends = [run[-1] for run in variant.runs]
        loss, seconds = (sum(values) / len(ends) for values in (variant.losses, [end.seconds for end in ends]))
        rows.append(
            (
                variant.name,
                format_count(variant.parameters),
                format_count(round(variant.flops_per_token)),
                format_bytes(variant.cache_bytes),
                f"{ends[0].tokens:,}",
                f"{ends[0].flops:.3g}",
                f"{seconds:.1f}",
                f"{loss:.4f}",
                f"{variant.spread:.4f}" if len(ends) > 1 else "",
            )
        )
    echo()
    print_table(columns, rows, right=" ".join(columns[1:]))

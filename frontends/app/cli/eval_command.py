"""`weft eval`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weft.ir.errors import WeftError
from weft.ir.storage import read_checked

from .completion import complete_sources
from .open_model import check_trust
from .options import add_passes_option, default_option, device_option
from .terminal import echo, format_bytes, format_count, format_json, print_note, print_table, show_progress

if TYPE_CHECKING:
    from ..api.verify.evaluation import Evaluation, Score

EXCEEDED = 1
_LIMITED = {"max_kl": ("KL", "kl"), "max_loss": ("ΔNLL", "nll_loss"), "min_cosine": ("cosine", "cosine")}


@click.command("eval", short_help="Measure the quality cost of rewrites: NLL, KL, time.")
@click.argument("models", nargs=-1, shell_complete=complete_sources, metavar="[MODEL]...")
@click.option("--against", required=True, shell_complete=complete_sources, help="The original SOURCE to compare with.")
@click.option("--text", required=True, type=click.Path(), help="The text file, in UTF-8; encoders embed each line.")
@add_passes_option(
    "NAME=PIPELINE, or a pipeline: also score the original rewritten by this pipeline; may be repeated.",
    "pipelines",
    multiple=True,
)
@click.option(
    "--weights",
    multiple=True,
    metavar="WEIGHTS",
    help='Also score the original with quantized weights: int4, "int4{group=64}"; may be repeated.',
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    type=click.Path(),
    metavar="DIR",
    help="Also score the original with this PEFT adapter merged; may be repeated.",
)
@default_option("--tokens", 4096, "Maximum number of tokens to predict.", type=click.IntRange(1))
@click.option(
    "--context",
    type=click.IntRange(1),
    help="Window length in tokens; default: 512, or the models' context if shorter.",
)
@click.option("--layers", is_flag=True, help="Also print the relative error of each layer's output.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Also draw quality against size, and the error and bits of each layer: .svg, .png or .pdf.",
)
@default_option("--theme", "light", "The colours of the chart.", type=click.Choice(["light", "dark"]))
@click.option("--max-kl", type=click.FloatRange(0), help="Exit with 1 if the KL of a model is above this.")
@click.option("--max-loss", type=float, help="Exit with 1 if the ΔNLL of a model is above this, in nats per token.")
@click.option("--min-cosine", type=float, help="Exit with 1 if the cosine of an encoder is below this.")
@device_option
@click.option("--trust", is_flag=True, help="Run the Python of folders compiled for PyTorch.")
@click.option("--json", "wants_json", is_flag=True, help="Print the result as JSON.")
@click.option("--record", is_flag=True, help="Add the scores to the records of the models; see `weft certificate`.")
@click.pass_context
def eval_command(
    ctx: click.Context,
    /,
    models: tuple[str, ...],
    pipelines: tuple[str, ...],
    plot: str | None,
    theme: str,
    layers: bool,
    wants_json: bool,
    record: bool,
    **options: Any,
) -> None:
    """Score each MODEL (a compiled folder, or any SOURCE) and the original on a text, one row per model.

    Decoders: negative log-likelihood (NLL) per token in nats, perplexity, KL divergence from the original, share of
    positions with the same most likely token. Encoders: cosine between embeddings of the same lines. All models: time
    per token, bytes of the weights, bits per weight of linear layers, parameters, cache bytes per token.

    With a limit (--max-kl, --max-loss, --min-cosine) the exit status is 1 if a model exceeds it, as a check in CI.

    \b
    Examples:
      weft eval out/ --against model.gguf --text notes.txt
      weft eval --against model.gguf --text notes.txt -p "half=cast{dtype=f16}" -p "mha-to-gqa{kv_heads=1}"
      weft eval --against ./Qwen3-0.6B --text notes.txt --weights int8 --weights int4 --weights "int4{group=64}"
      weft eval --against ./Qwen3-0.6B --adapter ./my-lora --text notes.txt
      weft eval q4/ q8/ --against model.gguf --text notes.txt --plot quality.svg
      weft eval smaller.weft --against model.gguf --text notes.txt --tokens 512 --layers
      weft eval q4/ --against model.gguf --text notes.txt --max-kl 0.05 --max-loss 0.02
    """
    from weft.backends.viz.formats.chart import check_chart

    from ...formats.weft.model_folder import find_model
    from ..api.verify.evaluation import evaluate
    from ..api.verify.plotting import plot_evaluation

    if plot is not None:
        check_chart(Path(plot))
    if options["trust"]:
        check_trust([options["against"], *models])
    rewrites = _parse_variants(pipelines)
    limits = {name: limit for name in _LIMITED if (limit := options.pop(name)) is not None}
    if limits and not (models or rewrites or options["weights"] or options["adapters"]):
        raise click.UsageError("a limit needs a model to compare with the original")
    for model in models if record else ():  # before long work
        read_checked(find_model(Path(model)))
    with show_progress("opening", "steps") as step:
        measured = layers or plot is not None
        evaluation = evaluate(models, rewrites=rewrites, layers=measured, progress=step, note=print_note, **options)
    for i, model in enumerate(models if record else (), 1):
        from ..api.certificate import record_evaluation

        record_evaluation(Path(model), evaluation, i, options["against"])
    if plot is not None:
        plot_evaluation(evaluation, plot, theme == "dark")
        print_note(f"{plot} written")
    if wants_json:
        echo(format_json(evaluation.json()))
    else:
        _print_evaluation(evaluation, layers)
    if excesses := _list_excesses(evaluation, limits):
        print_note("; ".join(excesses))
        ctx.exit(EXCEEDED)


def _list_excesses(evaluation: Evaluation, limits: Mapping[str, float]) -> list[str]:
    """Return a phrase for each model and limit that it exceeds; raise WeftError for a limit that cannot apply."""
    excesses = []
    for name, limit in limits.items():
        (column, key), option, sign = _LIMITED[name], f"--{name.replace('_', '-')}", -1 if name.startswith("min") else 1
        for score in evaluation.scores[1:]:
            if (value := getattr(score, key)) is None:
                raise WeftError(f"{option} does not apply to {score.name}, which has no {column}: leave it out")
            if not sign * value <= sign * limit:  # also a NaN
                relation = "above" if sign > 0 else "below"
                excesses.append(f"{score.name} has {column} {value:.4g}, {relation} {option} {limit:g}")
    return excesses


def _parse_variants(pipelines: Iterable[str]) -> dict[str, str]:
    """Return pipelines keyed by the NAME of NAME=PIPELINE, else by themselves; raise UsageError if a name repeats."""
    variants: dict[str, str] = {}
    for text in pipelines:
        match = re.fullmatch(r"\s*([\w.+-]+)\s*=(.*)", text, re.DOTALL)
        name, pipeline = (match[1], match[2]) if match else (text, text)
        if name in variants:
            raise click.UsageError(f"the name {name!r} is given to two pipelines: rename one")
        variants[name] = pipeline
    return variants


def _print_evaluation(evaluation: Evaluation, with_layers: bool) -> None:
    echo(f"{evaluation.tokens:,} tokens of {evaluation.text}, in windows of {evaluation.context}\n")
    columns = ("model", *_COLUMNS)
    cells = [(score.name, *(cell(score) for cell in _COLUMNS.values())) for score in evaluation.scores]
    used = [i for i in range(len(columns)) if any(row[i] for row in cells)]
    rows = [[row[i] for i in used] for row in cells]
    print_table([columns[i] for i in used], rows, right=" ".join(_COLUMNS))
    if with_layers and (layers := evaluation.scores[0].layers):
        echo("\nrelative error of the residual stream after each layer")
        rest = evaluation.scores[1:]
        rows = [[name, *(f"{s.layers[name]:.3g}" if name in s.layers else "" for s in rest)] for name in layers]
        print_table(("layer", *(s.name for s in rest)), rows)


_COLUMNS: dict[str, Callable[[Score], str]] = {  # name -> cell of a score; "" if it does not apply
    "NLL": lambda score: _format_number(score.nll, "{:.4f}"),
    "ΔNLL": lambda score: _format_number(score.nll_loss, "{:+.4f}"),
    "perplexity": lambda score: _format_number(score.perplexity, "{:.4g}"),
    "KL": lambda score: _format_number(score.kl, "{:.3g}"),
    "KL99": lambda score: _format_number(score.kl_99, "{:.3g}"),
    "agreement": lambda score: _format_number(score.agreement, "{:.2%}"),
    "cosine": lambda score: _format_number(score.cosine, "{:.4f}"),
    "ms/token": lambda score: f"{score.seconds * 1e3:.3g}",
    "tokens/s": lambda score: f"{1 / score.seconds:.3g}" if score.seconds else "",
    "weights": lambda score: format_bytes(score.weight_bytes),
    "bits": lambda score: _format_number(score.bits, "{:.2f}"),
    "parameters": lambda score: format_count(score.parameters) if score.parameters else "",
    "cache/token": lambda score: format_bytes(score.cache_bytes) if score.cache_bytes else "",
}


def _format_number(number: float | None, form: str) -> str:
    return "" if number is None else form.format(number)

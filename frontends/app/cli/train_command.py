"""`weft train`."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from weft.ir.errors import WeftError

from ..api.training.training_settings import TrainingSettings
from .completion import complete_sources
from .options import add_options, default_option, device_option, settings_options, take_settings
from .terminal import echo, format_duration, format_json, show_progress

if TYPE_CHECKING:
    from ..api.training.run_folder import Run, RunState

TEXT_OPTIONS = (
    click.option(
        "--text",
        "text",
        multiple=True,
        type=click.Path(),
        help="A text: UTF-8, JSON lines (.jsonl), token ids (.npy, .json), or a folder of the library datasets; repeat "
        "it for several.",
    ),
    default_option("--field", "text", "Name of the text in records of JSON lines and datasets."),
    click.option(
        "--tokenizer",
        help="bytes; bpe:8192, trained on the text; or a tokenizer.json or its folder. Default: the model's own; else "
        "a BPE of the vocabulary's size, bytes below 512.",
    ),
    click.option(
        "--validation", type=click.Path(), help="A held-out text; default: the last twentieth of each --text."
    ),
)


@click.command("train", short_help="Train an architecture or a checkpoint on a text.")
@click.argument("source", required=False, shell_complete=complete_sources)
@add_options(*TEXT_OPTIONS)
@click.option("-o", "--out", type=click.Path(), help="The folder for the run, which is then a SOURCE.")
@click.option(
    "--resume", type=click.Path(), help="Continue the run in this folder, bit by bit as if it had not stopped."
)
@settings_options(TrainingSettings)
@click.option("--save-as", metavar="MODEL", help="Another SOURCE that gets the trained weights, to generate with.")
@default_option("--every", 50, "Steps from one printed line to the next.", type=click.IntRange(1))
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard's event files.")
@device_option
@click.option("--json", "wants_json", is_flag=True, help="Print the result as JSON.")
def train_command(
    source: str | None,
    text: tuple[str, ...],
    out: str | None,
    resume: str | None,
    every: int,
    wants_json: bool,
    **options: Any,
) -> None:
    """Train SOURCE to predict the next token of a text (a decoder) or masked tokens (an encoder for fill-mask).

    SOURCE is an architecture file, a preset, or a checkpoint. The run folder has the best model, the last
    checkpoint, log.csv and the curve loss.svg. It is itself a SOURCE of `weft run`, `weft compile` and all others.

    \b
    Examples:
      weft train model.py --text book.txt -o run/
      weft train model.py --text book.txt --tokenizer bpe:8192 --steps 2000 --bf16 -o run/
      weft train ./SmolLM2-135M --text notes.jsonl --rate 5e-5 -o tuned/
      weft train model.py --resume run/ --steps 4000
      torchrun --nproc-per-node 8 -m weft train model.py --text data/ -o run/
    """
    from ..api.training import train as training

    chosen = take_settings(TrainingSettings, options)
    with show_progress("opening", "steps") as step:

        def report(state: RunState) -> None:
            step(state.phase, round(1000 * state.done), 1000)
            if not wants_json and (state.number % every == 0 or state.validation is not None):
                print_state(state)

        if resume is not None:
            fixed = (options.pop("tokenizer"), options.pop("validation"), options.pop("field") != "text")
            if any((out, *text, *fixed, *(chosen.keys() - {"steps"}))):
                raise WeftError(
                    "a resumed run has its text and settings: give --resume only SOURCE, --steps and --device"
                )
            run = training.resume(resume, source, steps=chosen.get("steps"), report=report, progress=step, **options)
        else:
            if source is None or not text or out is None:
                raise click.UsageError("training needs SOURCE, --text TEXT and -o FOLDER, or --resume FOLDER")
            settings = TrainingSettings(**chosen)
            run = training.train(source, text, out, settings, report=report, progress=step, **options)
    print_run(run, wants_json)


def print_run(run: Run, wants_json: bool) -> None:
    """Print the result of a run, in one of the processes that torchrun started."""
    if os.environ.get("RANK", "0") != "0":
        return
    if wants_json:
        echo(format_json(asdict(run) | {"folder": str(run.folder)}))
        return
    losses = ", ".join(f"{getattr(run, name):.5g} {name}" for name in ("before", "best", "last"))
    echo(f"{run.measure}: {losses}")
    echo(f"{run.folder} written; try `weft run {run.folder}`")


def print_state(state: RunState) -> None:
    """Print a line about a step of a run."""
    losses = "  ".join(f"{name} {value:.5g}" for name, value in state.step.losses.items() if value)
    validation = "" if state.validation is None else f"  validation {state.validation:.5g}"
    remaining = f"  {format_duration(state.remaining)} left" if state.done < 1 else ""
    speed = f"{state.speed:,.0f} tokens/s"
    echo(f"{state.phase} {state.number:5}  {losses}{validation}  rate {state.step.rate:.2e}  {speed}{remaining}")

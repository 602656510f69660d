"""`weft distil`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..api.training.training_settings import UNUSED, DistilSettings
from .completion import complete_sources
from .options import default_option, device_option, settings_options, take_settings
from .terminal import show_progress
from .train_command import print_run, print_state

if TYPE_CHECKING:
    from ..api.training.run_folder import RunState


@click.command("distil", short_help="Train a rewritten model to predict as its original does.")
@click.argument("model", shell_complete=complete_sources)
@click.option("--against", required=True, shell_complete=complete_sources, help="The original, before the rewrite.")
@click.option(
    "--text",
    "text",
    multiple=True,
    type=click.Path(),
    help="The training text, as of `weft train`; default: a mixture of prose, code and languages.",
)
@default_option("--field", "text", "Name of the text in records of JSON lines and datasets.")
@click.option("-o", "--out", type=click.Path(), help="The folder for the run, which is then a SOURCE.")
@click.option("--resume", type=click.Path(), help="Continue the run in this folder; give the other options again.")
@click.option(
    "--train",
    multiple=True,
    metavar="GROUP",
    help="Parameters to train: scales, norms, biases, changed, all, lora, or a pattern like 'layers.*.attn.*'; may "
    "be repeated. Default: scales, norms and biases of a quantized model, else changed.",
)
@settings_options(DistilSettings, *UNUSED)
@default_option("--every", 50, "Steps from one printed line to the next.", type=click.IntRange(1))
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard's event files.")
@device_option
@click.option("--json", "wants_json", is_flag=True, help="Print the result as JSON.")
def distil_command(
    model: str, out: str | None, resume: str | None, every: int, wants_json: bool, **options: Any
) -> None:
    """Train MODEL, a rewritten decoder or encoder, until its outputs are close to its original's (distillation).

    MODEL is the result of any passes: fewer key and value heads, windows, fewer layers or features, quantized weights.
    Each changed layer is first trained alone, then all together. Training needs PyTorch. Nothing is written as the best
    model unless it is closer to the original on held-out text.

    \b
    Examples:
      weft distil smaller/ --against model.gguf --text notes.txt --minutes 60 -o run/
      weft distil q4/ --against model.gguf --bf16 -o run/
      weft distil smaller/ --against model.gguf --train lora --rank 16 --steps 500 -o run/
    """
    from ..api.training.distil import distil

    folder = out if resume is None else resume
    if folder is None or (out is not None and resume is not None):
        raise click.UsageError("distil needs either -o FOLDER or --resume FOLDER")
    settings = DistilSettings(**take_settings(DistilSettings, options))
    with show_progress("opening", "steps") as step:

        def report(state: RunState) -> None:
            step(state.phase, round(1000 * state.done), 1000)
            if not wants_json and (state.number % every == 0 or state.validation is not None):
                print_state(state)

        run = distil(model, folder, settings, resumes=resume is not None, report=report, progress=step, **options)
    print_run(run, wants_json)

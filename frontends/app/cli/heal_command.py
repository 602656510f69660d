"""`weft heal`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from weft.ir.errors import WeftError
from weft.ir.storage import check_replaceable

from .completion import complete_sources
from .options import default_option, device_option
from .terminal import echo, show_progress


@click.command("heal", short_help="Train the scales of a quantized model against the original.")
@click.argument("model", shell_complete=complete_sources)
@click.option("--against", required=True, shell_complete=complete_sources, help="The original, before quantization.")
@click.option(
    "--text",
    type=click.Path(),
    help="Training text in UTF-8, or token ids (.npy, .json); default: a mixture of prose, code and languages.",
)
@click.option("-o", "--out", required=True, type=click.Path(), help="The folder for the healed model.")
@click.option("--tokens", type=click.IntRange(1), help="Tokens to train on, counting repetitions; default: 32768.")
@click.option(
    "--samples", type=click.IntRange(0), help="Additional training tokens that the original samples; default: 0."
)
@click.option("--seconds", type=float, help="Time limit of the training; default: no limit.")
@click.option("--rate", type=float, help="Peak step size of Adam, relative to each parameter; default: 0.0005.")
@click.option("--batch", type=click.IntRange(1), help="Windows per step; default: 4.")
@click.option("--context", type=click.IntRange(2), help="Tokens per window; default: 256.")
@click.option("--bf16", is_flag=True, help="Train with matrix products in bf16, which some CPUs and GPUs speed up.")
@default_option("--seed", 0, "Seed of the order of windows and of samples.")
@device_option
def heal_command(model: str, out: str, **options: Any) -> None:
    """Train the scales, norms and biases of the quantized MODEL by distillation from the original. Codes do not change.

    MODEL is a folder from `weft opt -p quantize -o FOLDER`, or any other SOURCE that is quantized. Training needs
    PyTorch. On a CPU it takes minutes for a model of 100 million parameters. weft validates the result on held-out
    text, and writes nothing if it is not closer to the original there.

    \b
    Examples:
      weft heal q4/ --against model.gguf -o healed/
      weft heal q4/ --against model.gguf --text notes.txt --seconds 300 -o healed/
    """
    from ...formats.weft.model_folder import write_model
    from ..api.heal import heal_and_measure

    check_replaceable(Path(out))
    arguments = {name: value for name, value in options.items() if value is not None}
    with show_progress("opening", "steps") as step:
        healed = heal_and_measure(model, progress=step, **arguments)
    if not healed.improved:
        raise WeftError(
            f"{healed.steps:,} steps brought {model} no closer to the original on held-out text (KL "
            f"divergence {healed.before:.3g}): nothing is written; try a smaller --rate or another --text"
        )
    with show_progress(f"writing {out}") as step:
        write_model(healed.model, out, progress=step)
    trained = f"{healed.scales:,} scales and {healed.norms_and_biases:,} parameters of norms and biases"
    echo(f"{healed.steps:,} steps changed {trained}")
    echo(f"KL divergence from the original on held-out text: {healed.before:.3g} -> {healed.after:.3g}")
    echo(f"{out} written")

"""`weft heal`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from weft.ir.errors import WeftError
from weft.ir.storage import check_replaceable

from .completion import complete_sources
from .options import device_option
from .terminal import echo, progress


@click.command("heal", short_help="Refit the scales of a quantized model to the original.")
@click.argument("model", shell_complete=complete_sources)
@click.option("--against", required=True, shell_complete=complete_sources, help="The original, before quantization.")
@click.option(
    "--text",
    type=click.Path(),
    help="A text in UTF-8, or token ids (.npy, .json); default: a mixture of prose, code and languages.",
)
@click.option("-o", "--out", required=True, type=click.Path(), help="The folder for the healed model.")
@click.option("--tokens", type=click.IntRange(1), help="Tokens to train on, with repetitions; default: 32768.")
@click.option(
    "--samples", type=click.IntRange(0), help="Tokens of more sequences, sampled by the original; default: 0."
)
@click.option("--seconds", type=float, help="Time limit of the training; default: no limit.")
@click.option("--rate", type=float, help="Relative size of the first steps of Adam; default: 0.0005.")
@click.option("--batch", type=click.IntRange(1), help="Windows per step; default: 4.")
@click.option("--context", type=click.IntRange(2), help="Tokens per window; default: 256.")
@click.option("--bf16", is_flag=True, help="Train with products in bf16: faster where the CPU or GPU has them.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order of windows, and of samples.")
@device_option
def heal_command(model: str, out: str, **options: Any) -> None:
    """Refit scales, norms and biases of the quantized MODEL to the original by distillation; codes stay as they are.

    MODEL is what `weft opt -p quantize -o FOLDER` writes, or any other SOURCE that is quantized. The training needs
    PyTorch; on a CPU it takes minutes for a model of 100 million weights. The result is validated on parts of the text
    that are not trained on: if it is not closer to the original there, nothing is written.

    \b
    Examples:
      weft heal q4/ --against model.gguf -o healed/
      weft heal q4/ --against model.gguf --text notes.txt --seconds 300 -o healed/
    """
    from ...formats.weft.model_folder import write_model
    from ..api.heal import healing

    check_replaceable(Path(out))
    arguments = {name: value for name, value in options.items() if value is not None}
    with progress("opening", "steps") as step:
        healed = healing(model, progress=step, **arguments)
    if not healed.improved:
        raise WeftError(
            f"{healed.steps:,} steps brought {model} no closer to the original on text that was held back (KL "
            f"divergence {healed.before:.3g}): nothing is written; try a smaller --rate or another --text"
        )
    with progress(f"writing {out}") as step:
        write_model(healed.model, out, progress=step)
    trained = f"{healed.scales:,} scales and {healed.norms_and_biases:,} parameters of norms and biases"
    echo(f"{healed.steps:,} steps changed {trained}")
    echo(f"KL divergence from the original, on text that was held back: {healed.before:.3g} -> {healed.after:.3g}")
    echo(f"{out} written")

"""`weft verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import default_option, device_option
from .terminal import echo, format_json, show_progress

if TYPE_CHECKING:
    from ..api.verify.verification import Verification

DIFFERENT = 1


@click.command("verify", short_help="Compare a compiled folder with its source.")
@click.argument("folder", type=click.Path())
@click.option("--against", type=click.Path(), help="A Hugging Face folder that transformers runs as the reference.")
@click.option("--prompt", help="The text to compare on; default: a built-in sentence.")
@default_option("--tokens", 16, "Decode steps after the prompt.", type=click.IntRange(0))
@device_option
@click.option("--trust", is_flag=True, help="Run the code that the folder names: model.py, an architecture file.")
@click.option("--json", "wants_json", is_flag=True, help="Print the result as JSON.")
@click.option("--record", is_flag=True, help="Add the result to the folder's record; see `weft certificate`.")
@click.pass_context
def verify_command(ctx: click.Context, /, folder: str, wants_json: bool, record: bool, **options: Any) -> None:
    """Compare the compiled model in FOLDER with its reference; exit status 1 if they differ beyond rounding.

    weft first compares the files with their checksums. The reference is the source that the folder's manifest names,
    in float64 (slow for large models), or the folder of --against, run by transformers. The compiled model reads the
    prompt in two chunks and continues it token by token, so the comparison includes the caches.

    \b
    Examples:
      weft verify out/
      weft verify out/ --prompt "In 1969" --tokens 64
      weft verify tiny/ --trust                       compiled from an architecture file, which is code
      weft verify out/ --against ./SmolLM2-135M-Instruct
    """
    from ..api.verify.verification import verify_folder

    with show_progress("opening", "steps") as step:
        verification = verify_folder(folder, progress=step, **options)
    if record:
        from ..api.certificate import record_verification

        record_verification(verification.folder, verification, options)
    if wants_json:
        from dataclasses import asdict

        echo(format_json({**asdict(verification), "folder": folder, "passed": verification.passed}))
    else:
        _print_verification(verification)
    if not verification.passed:
        ctx.exit(DIFFERENT)


def _print_verification(verification: Verification) -> None:
    from ..api.inspect.inspection import align_pairs

    tolerance = f"(tolerance for {verification.dtype}: {verification.tolerance:.2g})"
    rows = [
        ("reference", verification.reference),
        ("positions compared", str(verification.positions)),
        ("largest error", f"{verification.max_absolute:.3g}"),
        ("relative error", f"{verification.max_relative:.3g} {tolerance}"),
    ]
    rows += [(f"error of {name}", f"{error:.3g}") for name, error in verification.outputs.items()]
    if verification.argmax_agreement is not None:
        rows.append(("same next token", f"{verification.argmax_agreement:.2%}"))
    if verification.kl_max is not None:
        rows.append(("KL divergence", f"mean {verification.kl_mean:.3g}, largest {verification.kl_max:.3g} nats"))
    rows.append(("first diverging layer", _describe_divergence(verification)))
    if (weights := verification.weights) is not None:
        rows.append(("weights", weights.wrong or f"{weights.tensors} tensors equal their recipes"))
        if weights.fitted:
            distance = f"the largest relative distance from the original {weights.farthest:.3g}"
            far = distance if weights.farthest else "exact"
            rows.append(("fitted codes", f"{weights.fitted} matrices, taken from the folder; {far}"))
    echo("\n".join(align_pairs(rows)))
    without = f", without: {', '.join(verification.without)}" if verification.without else ""
    is_wrong = weights is not None and not weights.passed
    reason = "the weights are not those of the source" if is_wrong else "the errors exceed the rounding tolerance"
    echo(f"passed{without}" if verification.passed else f"FAILED: {reason}")


def _describe_divergence(verification: Verification) -> str:
    divergence = verification.divergence
    if divergence is None and not verification.layers:
        return "unknown: the compiled model and the reference have no layer boundaries in common"
    if divergence is None:
        if not verification.passed:
            layers = list(verification.layers)
            return f"none of {len(layers)}: look after {layers[-1]}, in the last layer, norm or head"
        worst, error = max(verification.layers.items(), key=lambda item: item[1])
        return f"none of {len(verification.layers)} (largest relative error {error:.3g}, after {worst})"
    value_text = f", first at {divergence.value} ({divergence.value_error:.3g})" if divergence.value is not None else ""
    return f"{divergence.layer}, relative error {divergence.error:.3g}{value_text}"

"""`weft compile`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from weft.ir.errors import WeftError

from .completion import complete_dtypes, complete_pipelines, complete_sources, complete_targets
from .options import adapter_option
from .shown import echo, note, progress, size

if TYPE_CHECKING:
    from ..api.compile import CompileReport

FOLDER = click.Path(file_okay=False)


@click.command("compile", short_help="Make a folder that ONNX Runtime or PyTorch runs.")
@click.argument("source", shell_complete=complete_sources)
@click.option("-o", "--out", required=True, type=click.Path(), help="The folder to write; appears whole or not at all.")
@click.option(
    "--target",
    default="ort-cpu",
    show_default=True,
    shell_complete=complete_targets,
    help="ort-cpu, ort-cuda, onnx (standard operators only), or torch (PyTorch source).",
)
@click.option("--dtype", shell_complete=complete_dtypes, help="f32, f16 or bf16; default: the best of the target.")
@click.option(
    "-p",
    "--passes",
    default="default",
    show_default=True,
    shell_complete=complete_pipelines,
    help="The pipeline: names with arguments, `-name` leaves one out; or @FILE that holds it.",
)
@click.option("--max-length", type=int, help="Most tokens of prompt and answer together; default: the model's context.")
@click.option("--dump-ir", type=FOLDER, help="Write the graph after every pass into this folder.")
@click.option("--verify", is_flag=True, help="Check every pass on small random inputs in float64, and name what broke.")
@click.option(
    "--prepack",
    is_flag=True,
    help="Store the weights also as packed for this kind of CPU: faster, twice the disk space.",
)
@click.option(
    "--keep-blocks",
    type=click.Choice(["head", "all"]),
    help="Keep a GGUF's 4- and 8-bit blocks, in the head or everywhere, instead of widening them: smaller, and faster "
    "for one text on CPUs by ONNX Runtime (targets ort-cpu, torch).",
)
@click.option(
    "--tensor-parallel",
    type=int,
    default=1,
    help="Write parallel.py, by which so many processes share the model (target torch).",
)
@adapter_option
@click.option("--trace", is_flag=True, help="Tell what each pass did, and which lowerings were refused and why.")
@click.option(
    "--explain",
    is_flag=True,
    help="Tell which kernel computes what of a token on a GPU or this CPU, and why not (target torch).",
)
@click.option(
    "--seed", default=0, show_default=True, help="Seed of the random weights of a model without a checkpoint."
)
def compile_command(
    source: str,
    out: str,
    target: str,
    dtype: str | None,
    passes: str,
    max_length: int | None,
    dump_ir: str | None,
    verify: bool,
    prepack: bool,
    keep_blocks: str | None,
    tensor_parallel: int,
    adapters: tuple[str, ...],
    trace: bool,
    explain: bool,
    seed: int,
) -> None:
    """Compile SOURCE into a folder: the model, its configuration and tokenizer, and a manifest.

    An older result in the same place survives until the new one is whole. Architectures without a checkpoint (presets,
    files) get their declared random weights.

    \b
    Examples:
      weft compile model.gguf -o out/
      weft compile ./Qwen3-0.6B --target ort-cuda --dtype bf16 --max-length 8192 -o out/
      weft compile ./Qwen3-0.6B --adapter ./my-lora -o out/
      weft compile model.gguf --target torch -o readable/ && python readable/generate.py "Once upon a time"
      weft compile model.py:wide -o out/ --passes "default,-last-token-logits" --dump-ir steps/ --verify
    """
    from ..api.compile import compile

    if explain and target != "torch":
        raise WeftError(f"--explain is for target torch, not for {target}; --trace tells how ops were lowered")
    with progress(f"reading {source}") as step:
        report = compile(
            source,
            out,
            target=target,
            dtype=dtype,
            passes=passes,
            max_length=max_length,
            seed=seed,
            dump_ir=dump_ir,
            verify=verify,
            prepack=prepack,
            keep_blocks=keep_blocks or "",
            tensor_parallel=tensor_parallel,
            adapters=adapters,
            progress=step,
        )
    tell_random(report, seed)
    for line in report.notes:
        note(line)
    if trace:
        echo("\n".join([str(report.passes), *report.trace]), err=True)
    if explain:
        echo("\n".join(_explained(report)))
    echo(_summary(report, out))


def _explained(report: CompileReport) -> list[str]:
    """Return a line for each kind of node of a decode step on a GPU, and one on this CPU."""
    import torch

    from weft.backends.torch.package.explain import explain, explain_cpu
    from weft.backends.torch.program.statements import TORCH_NAMES

    dtype = getattr(torch, TORCH_NAMES[report.dtype])
    return [*map(str, explain(report.graph, dtype)), explain_cpu(dtype)]


def tell_random(report: CompileReport, seed: int = 0) -> None:
    """Say so where weights were drawn rather than read."""
    if report.model.random_init:
        note(f"{report.model.description} has no checkpoint: its weights are random (seed {seed})")


def _summary(report: CompileReport, out: str) -> str:
    seconds = sum(report.seconds.values())
    parts = ", ".join(f"{name} {s:.1f} s" for name, s in report.seconds.items())
    use = f"; try `weft run {shlex.quote(out)} --prompt …`" if report.model.tokenizer else ""
    what = f"{report.model.description}, for {report.target} in {report.dtype}"
    much = f"{size(report.weight_bytes)} of weights, {len(report.graph)} graph nodes"
    return f"{out}: {what}: {much} in {seconds:.1f} s ({parts}){use}"

"""`weft compile`."""

from __future__ import annotations

import shlex
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from weft.backends import DEFAULT_TARGET
from weft.ir.errors import WeftError

from .completion import complete_dtypes, complete_sources
from .options import adapter_option, add_passes_option, family_option, seed_option, target_option, without_option
from .terminal import echo, format_bytes, json_option, print_note, print_written, show_progress

if TYPE_CHECKING:
    from ..api.compile import CompileReport

FOLDER = click.Path(file_okay=False)


class TargetCommand(click.Command):
    """A command with the options of all targets, plugins included, in addition to its own."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if self.name not in ctx.meta:  # click calls this several times, and compares the parameters by identity
            *params_of_command, help_option = super().get_params(ctx)
            ctx.meta[str(self.name)] = [*params_of_command, *_build_target_options(), help_option]
        params: list[click.Parameter] = ctx.meta[str(self.name)]
        return params


def _build_target_options() -> list[click.Option]:
    from weft.backends.options import MOVED
    from weft.backends.target import TARGETS, collect_options

    options = [click.Option([f"--{name.replace('_', '-')}"], hidden=True) for name in MOVED]
    for option, targets in collect_options().values():
        text = f"{option.help} (target{'s' * (len(targets) > 1)} {', '.join(targets)})."
        kind = click.Choice(option.choices) if option.choices else option.type
        flag = click.Option([option.flag, option.name], type=kind, is_flag=option.type is bool, default=None, help=text)
        flag.callback = partial(_require_change, option.default)
        options.append(flag)
    explaining = ", ".join(target.name for target in TARGETS.values() if target.explains)
    text = "List the kernel of each part of a decode step on a GPU and on this CPU, and the reasons for fallbacks"
    return [*options, click.Option(["--explain"], is_flag=True, help=f"{text} (target {explaining}).")]


def _require_change(default: Any, ctx: click.Context, option: click.Parameter, value: Any) -> Any:
    """Return `value`, given for a target's option; raise BadParameter if it is an empty `default`, such as 0."""
    if value is not None and value == default and not default and not ctx.resilient_parsing:
        raise click.BadParameter(f"{value!r} is the default: leave the option out", ctx, option)
    return value


@click.command("compile", cls=TargetCommand, short_help="Compile a model to a folder for ONNX Runtime or PyTorch.")
@click.argument("source", shell_complete=complete_sources)
@click.option("-o", "--out", required=True, type=click.Path(), help="The folder to write (atomically).")
@target_option("The target: {targets}; see `weft targets`.", default=DEFAULT_TARGET, show_default=True)
@click.option("--dtype", shell_complete=complete_dtypes, help="f32, f16 or bf16; default: the target's first dtype.")
@add_passes_option(
    'The pipeline of passes, such as "default, -pack-qkv" (`-name` removes a pass), or @FILE that contains it.',
    default="default",
    show_default=True,
)
@click.option(
    "--weights",
    metavar="int4 | int8 | …",
    help='Quantize the weights. "int4{method=fast}" searches scales only (seconds); method=best, the default, keeps '
    "codes of the file or fits new ones to a text (minutes); see `weft passes quantize`. Default: not quantized.",
)
@click.option(
    "--max-length",
    type=int,
    help="Maximum tokens of prompt and answer together; default: the model's context, or 4096.",
)
@click.option("--dump-ir", type=FOLDER, help="Write the graph before and after every pass into this folder, as text.")
@click.option(
    "--verify", is_flag=True, help="Check every pass on small random inputs in float64, and name the pass that fails."
)
@adapter_option
@family_option
@click.option(
    "--switch-adapter",
    "switch_adapters",
    multiple=True,
    type=click.Path(),
    metavar="DIR",
    help="A LoRA adapter to store next to the model, which ONNX Runtime or onnxruntime-genai selects at run time; may "
    "be repeated.",
)
@click.option(
    "--trace", is_flag=True, help="Report on stderr: the rewrites of each pass, and refused lowerings with reasons."
)
@without_option
@seed_option
@json_option
def compile_command(
    source: str, out: str, target: str, trace: bool, explain: bool, wants_json: bool, **options: Any
) -> None:
    """Compile SOURCE into a folder: the model, its configuration and tokenizer, and a manifest.

    An older folder is replaced only when the new one is complete. An architecture without a checkpoint (a preset or
    a file) gets its declared random weights. With --as, weft compares the result with transformers, if transformers
    is installed and knows the type.

    \b
    Examples:
      weft compile model.gguf -o out/
      weft compile ./Qwen3-0.6B --target ort-cuda --dtype bf16 --max-length 8192 -o out/
      weft compile model.gguf --weights int4 -o small/
      weft compile ./Qwen3-0.6B --adapter ./my-lora -o out/
      weft compile model.gguf --target torch -o readable/ && python readable/generate.py "Once upon a time"
      weft compile model.py:wide -o out/ --passes "default,-last-token-logits" --dump-ir steps/ --verify
    """
    from weft.backends.target import TARGETS, join_targets

    from ..api.compile import compile

    backend = TARGETS.lookup(target)
    if explain and not backend.explains:
        explaining = join_targets([target.name for target in TARGETS.values() if target.explains])
        raise WeftError(f"--explain is for {explaining} only, not for {target}: leave it out, or use --trace")
    with show_progress(f"reading {source}") as step:
        options = {name: value for name, value in options.items() if value is not None}
        report = compile(source, out, target=target, progress=step, **options)
    note_random_weights(report)
    for line in report.notes:
        print_note(line)
    if trace:
        echo("\n".join([str(report.passes), *report.trace]), err=True)
    if wants_json:
        facts = dict[str, Any](source=report.model.description, target=target, dtype=report.dtype)
        facts |= {"nodes": len(report.graph), "weight_bytes": report.weight_bytes, "refused_lowerings": report.trace}
        facts |= {"explained": report.explain()} if explain else {}
        print_written(out, report.passes, report.notes, report.seconds, backend.libraries, **facts)
    else:
        echo("\n".join([*(report.explain() if explain else ()), _summarize(report, out)]))
    if report.model.family is not None and report.graph.meta.get("kind") == "image-encoder":
        print_note(f"{out} reads images, so it was not compared with transformers")
    elif report.model.family is not None and TARGETS.lookup(report.target).runs:
        (print_note if wants_json else echo)(_compare_with_transformers(out, source, report.model.family))


def _compare_with_transformers(out: str, source: str, family: str) -> str:
    """Compare `out`, whose `source` was read as `family` (--as), with transformers; return a sentence for the user.

    Raise WeftError if the two differ.
    """
    from ..api.verify.verification import verify_folder

    try:
        with show_progress(f"comparing {out} with transformers on {source}") as step:
            result = verify_folder(out, against=source, trust=True, progress=step)
    except WeftError as e:
        reason = str(e).splitlines()[0]  # transformers' own errors have more lines
        return f"not checked whether {source} computes the same as a {family} model: {reason}"
    if not result.passed:
        raise WeftError(
            f"{source} is not a {family} model: {out} differs from transformers by {result.max_relative:.1e} of the "
            f"largest value, where rounding explains {result.tolerance:.1e}"
        )
    return f"equal to transformers on {source} within {result.max_relative:.1e}"


def note_random_weights(report: CompileReport) -> None:
    """Print a note if the weights are random, not a checkpoint's."""
    if report.model.random_init:
        print_note(f"{report.model.description} has no checkpoint: its weights are random (seed {report.model.seed})")


def _summarize(report: CompileReport, out: str) -> str:
    from weft.backends.target import TARGETS

    seconds = sum(report.seconds.values())
    parts = ", ".join(f"{name} {s:.1f} s" for name, s in report.seconds.items())
    runs = report.model.tokenizer and TARGETS.lookup(report.target).runs
    use = f"; try `weft run {shlex.quote(out)} --prompt …`" if runs else ""
    subject = f"{report.model.description}, for {report.target} in {report.dtype}"
    amount = f"{format_bytes(report.weight_bytes)} of weights, {len(report.graph)} graph nodes"
    return f"{out}: {subject}: {amount} in {seconds:.1f} s ({parts}){use}"

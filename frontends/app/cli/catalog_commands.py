"""`weft ops`, `weft targets`, `weft presets`, `weft families`: lists from the registries themselves."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from typing import TYPE_CHECKING

import click

from weft.ir.errors import WeftError

from .completion import complete_families, complete_ops, complete_presets, complete_targets
from .terminal import echo, format_bytes, format_count, format_json, print_table

if TYPE_CHECKING:
    from weft.backends.target import Backend
    from weft.ir.op import Op

EXAMPLE_PRESET = "smollm2-135m"  # the preset whose pipelines are printed


@click.command("ops", short_help="List the ops.")
@click.argument("name", required=False, shell_complete=complete_ops)
def ops_command(name: str | None) -> None:
    """List the ops that a graph consists of, or describe one of them.

    \b
    Examples:
      weft ops                 all of them, by family
      weft ops attention       operands, attributes, types, example cases, and which targets run it
    """
    from weft.ir import OPS, lookup

    if name is not None:
        _print_op(lookup(name))
        return
    rows = []
    for family, ops in groupby(sorted(OPS.values(), key=lambda op: (_get_family(op), op.name)), _get_family):
        for i, op in enumerate(ops):
            signature = "; ".join(filter(None, (_format_operands(op), ", ".join(op.attrs))))
            rows.append(("" if i else family, op.name, signature, get_first_sentence(op.doc)))
    print_table(("family", "op", "operands; attributes", "what it does"), rows)


def _get_family(op: Op) -> str:
    return op.module.rpartition(".")[2].replace("_", " ")


def _format_operands(op: Op) -> str:
    return ", ".join("*" * o.variadic + o.name + "?" * o.optional for o in op.operands)


def get_first_sentence(doc: str) -> str:
    """Return the first sentence of `doc`; without a full stop, its first paragraph."""
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    sentence, end, _ = paragraph.partition(". ")
    return sentence + end.rstrip()


def _print_op(op: Op) -> None:
    from weft.backends.target import TARGETS
    from weft.ir.op import format_type
    from weft.ir.recipes.spelling import spell

    echo(f"{op.name}({_format_operands(op)}) -> {', '.join(op.output_names) or 'output'}\n\n{op.doc}\n")
    if op.attrs:
        rows = [(a.name, format_type(a.type), "" if a.required else spell(a.default)) for a in op.attrs.values()]
        print_table(("attribute", "type", "default"), rows)
        echo()
    facts = {
        "family": _get_family(op),
        "traits": ", ".join(sorted(t.value for t in op.traits)) or "none",
        "body in simpler ops": "yes" if op.has_body else "no",
    }
    echo("\n".join([*(f"{key}: {value}" for key, value in facts.items()), "lowered by:"]))
    for name, target in TARGETS.items():
        try:
            lowerings = target.lowerings(op.name) or ["its body" if op.has_body else "nothing"]
        except WeftError as e:  # for a missing library
            lowerings = [str(e)]
        echo(f"  {name}: {', '.join(lowerings)}")
    echo("\n  ".join(["cases:", *_format_cases(op)]))


def _format_cases(op: Op) -> list[str]:
    from weft.ir.recipes.spelling import spell
    from weft.ir.types import TensorType, dtypes

    lines = []
    for case in op.cases:
        arrays = [a.astype("float32") if a is not None and a.dtype == "float64" else a for a in case.draw()]
        types = [None if a is None else TensorType(dtypes.from_numpy(a), tuple(a.shape)) for a in arrays]
        attrs = op.check_attrs(case.attrs)
        operands = [str(t) if t else "_" for t in types] + [f"{k}={spell(v)}" for k, v in case.attrs.items()]
        lines.append(f"({', '.join(operands)}) -> {', '.join(map(str, op.types(types, attrs)))}")
    return lines


@click.command("targets", short_help="List the targets of compile.")
@click.argument("name", required=False, shell_complete=complete_targets)
@click.option("--json", "wants_json", is_flag=True, help="Print all properties and options as JSON.")
@click.option(
    "--pipeline",
    is_flag=True,
    help=f"List the passes that the target runs for the preset {EXAMPLE_PRESET}, graph by graph.",
)
def targets_command(name: str | None, wants_json: bool, pipeline: bool) -> None:
    """List the targets of `weft compile`, or describe one of them with its properties and options.

    \b
    Examples:
      weft targets
      weft targets ort-cpu                     its properties, and the effect of each of its options
      weft targets torch --pipeline            the passes that it runs, and the graphs that they compute
      weft targets --json | jq '.[].name'
    """
    from weft.backends.target import TARGETS

    selected = [*TARGETS.values()] if name is None else [TARGETS.lookup(name)]
    if pipeline and wants_json:
        raise WeftError("--pipeline is printed as text: leave out --json")
    if pipeline:
        echo("\n\n".join(map(_format_pipelines, selected)))
    elif wants_json:
        echo(format_json([target.describe() for target in selected]))
    elif name is None:
        rows = []
        for target in selected:
            flags = ", ".join(option.flag for option in target.options.list_all().values())
            rows.append((target.name, target.runtime, target.device, ", ".join(target.dtypes), target.doc, flags))
        print_table(("target", "run by", "device", "dtypes", "what it is", "options"), rows)
    else:
        _print_target(selected[0])


def _format_pipelines(target: Backend) -> str:
    """Return the passes of a target, phase by phase, then the passes of each graph (form) that it derives."""
    from weft.passes import Pipeline, run_passes

    from ... import load_source

    graph = load_source(EXAMPLE_PRESET).graph
    pipeline = target.pipeline(graph, target.dtypes[0], max_length=graph.meta["context"])

    def phases(pipeline: Pipeline) -> list[str]:
        return [f"  {phase}" for phase in str(pipeline).split("; ") if phase]

    lines = [f"{target.name}: {target.doc}", *phases(pipeline)]
    try:
        forms = target.forms(run_passes(graph, pipeline), target.options())
    except WeftError as missing:  # a library is missing
        return "\n".join([*lines, f"its forms are not listed: {missing}"])
    for name, form in forms.items():
        lines += [f"form {name}{f', of {form.of}' * bool(form.of)}:", *phases(form.pipeline)]
    return "\n".join(lines)


def _print_target(target: Backend) -> None:
    from weft.ir.recipes.spelling import spell

    facts = {
        "runs on": f"{target.device}, by {target.runtime}",
        "dtypes": ", ".join(target.dtypes),
        "operators": f"ONNX opset {target.opset}" * bool(target.opset) + ", com.microsoft" * target.contrib,
        "phases of the default pipeline": ", ".join(target.phases) or "all",
        "passes that it leaves out": ", ".join(target.slower),
    }
    lines = [f"{key}: {value}" for key, value in facts.items() if value]
    echo("\n".join([f"{target.name}: {target.doc}\n", *lines]))
    if options := target.options.list_all().values():
        echo()
        rows = [(o.flag, o.type_text, spell(o.default) if o.default else "", o.help) for o in options]
        print_table(("option", "type", "default", "what it does"), rows)


@click.command("presets", short_help="List published architectures.")
@click.argument("name", required=False, shell_complete=complete_presets)
def presets_command(name: str | None) -> None:
    """List the presets, published architectures that every command accepts as a SOURCE, or show one of them.

    A preset has no checkpoint: its weights get their declared random initialization.

    \b
    Examples:
      weft presets
      weft presets gpt2
      weft inspect gpt2
    """
    from ... import PRESETS

    _check_name(name, PRESETS, "preset", "presets")
    selected = PRESETS if name is None else [name]
    columns = ("preset", "parameters", "active", "KV/token", "state", "context", "architecture")
    print_table(columns, [_build_preset_row(n) for n in selected], right="parameters active KV/token state context")
    if name is None:
        echo("\nactive: without experts that a token is not routed to; KV/token and state: bytes in f16")
    else:
        echo(f"\n{PRESETS[name].parameters:,} parameters\n\n{PRESETS[name].model()}")


def _build_preset_row(name: str) -> tuple[str, ...]:
    from weft.passes.analysis.costs import count_active_parameters, count_state_bytes, find_cache_sizes

    from ... import PRESETS

    preset = PRESETS[name]
    graph = preset.model().graph()
    active, context = count_active_parameters(graph), graph.meta["context"]
    per_token = 2 * sum(width for width, _ in find_cache_sizes(graph.nodes))
    state = count_state_bytes(graph.nodes, 2)
    return (
        name,
        format_count(preset.parameters),
        "" if active == preset.parameters else format_count(active),
        format_bytes(per_token) if per_token else "",
        format_bytes(state) if state else "",
        f"{context:,}" if context else "",
        preset.about,
    )


@click.command("families", short_help="List supported checkpoint families.")
@click.argument("name", required=False, shell_complete=complete_families)
def families_command(name: str | None) -> None:
    """List the families of Hugging Face folders (their model_type) and the libraries that load them.

    With a NAME, show its GGUF architecture and its export formats.

    docs/supported.md lists the errors of the built-in families relative to transformers.

    \b
    Examples:
      weft families
      weft families gemma2
    """
    from ...models.families import FAMILIES
    from ...models.tables.family import tabulate_families

    _check_name(name, FAMILIES, "family", "families")
    if name is None:
        head, *rows = tabulate_families(FAMILIES)
        return print_table(head, rows)
    gguf, loaded_by = FAMILIES[name].gguf, FAMILIES[name].transformers
    echo(f"Hugging Face folders: {f'read, and exported for {loaded_by}' if loaded_by else 'read'}")
    if gguf is not None:
        echo(f"GGUF files of {gguf.model_types[0]}: {'read and exported' if gguf.loader else 'read'}")


def _check_name(name: str | None, names: Collection[str], kind: str, command: str) -> None:
    from weft.ir.errors import unknown_name_error

    if name is not None and name not in names:
        raise unknown_name_error(kind, name, names, f"see `weft {command}`")

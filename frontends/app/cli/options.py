"""Options that several commands share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import click

from .completion import complete_families, complete_pipelines, complete_targets

T = TypeVar("T", bound=Callable[..., Any])
LOADING = ("device", "threads", "check", "adapters", "without", "target")  # options that are keywords of `open_model`


class TargetOption(click.Option):
    """The option of `target_option`: the targets are only imported when its help is printed."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        from weft.backends.target import TARGETS

        self.help = (self.help or "").format(targets=", ".join(TARGETS))
        return super().get_help_record(ctx)


def default_option(name: str, default: Any, help: str, **more: Any) -> Callable[[T], T]:
    """Return the decorator that adds an option whose help ends with its `default`; `more` as in `click.option`."""
    return click.option(name, default=default, show_default=True, help=help, **more)


def add_options(*options: Callable[[Any], Any]) -> Callable[[T], T]:
    """Return the decorator that adds `options` to a command, in this order."""

    def add(command: T) -> T:
        for option in reversed(options):  # decorators apply from the bottom up
            command = option(command)
        return command

    return add


def settings_options(settings: type[Any], *without: str) -> Callable[[T], T]:
    """Return the decorator that adds an option for each field of `settings` with a help, except `without`. Options that
    are not given are None."""
    options = []
    for field in dataclasses.fields(settings):
        if "help" in field.metadata and field.name not in without:
            kind, least = str(field.type).partition(" ")[0], field.metadata.get("least")
            types: dict[str, Any] = {"int": click.IntRange(least), "float": float, "bool": bool}
            type_ = types.get(kind) or click.Choice(field.metadata["choices"])
            names, text = (f"--{field.name.replace('_', '-')}", field.name), field.metadata["help"]
            options.append(click.option(*names, default=None, type=type_, is_flag=kind == "bool", help=text))
    return add_options(*options)


def take_settings(settings: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of the class `settings` from `options`; return those with a value, keyed by name."""
    values = {field.name: options.pop(field.name, None) for field in dataclasses.fields(settings)}
    return {name: value for name, value in values.items() if value not in (None, ())}


def target_option(help: str, **more: Any) -> Callable[[T], T]:
    """Return the decorator that adds the option of a target; {targets} in `help` becomes the list of targets."""
    return click.option("--target", cls=TargetOption, shell_complete=complete_targets, help=help, **more)


device_option = default_option(
    "--device",
    "auto",
    "The device to run on; auto: a GPU if the model and the runtime can use one, else the CPU.",
    type=click.Choice(["auto", "cpu", "cuda"]),
)
prefix_cache_option = click.option(
    "--prefix-cache",
    type=click.IntRange(0),
    help="Memory in MiB for the caches of earlier prompts and answers, from which later prompts begin; 0: none; "
    "default: 1024.",
)
seed_option = click.option(
    "--seed", type=int, help="Seed of the random weights of a model without a checkpoint; default: 0."
)
adapter_option = click.option(
    "--adapter",
    "adapters",
    multiple=True,
    type=click.Path(),
    metavar="DIR",
    help="A PEFT adapter (LoRA, DoRA) to merge into SOURCE; repeat it to merge several, in this order.",
)
family_option = click.option(
    "--as",
    "family",
    metavar="FAMILY",
    shell_complete=complete_families,
    help="Read a Hugging Face folder as a model of this family, whatever its model_type; see `weft families`.",
)
without_option = click.option(
    "--without",
    multiple=True,
    metavar="NAME",
    help="Leave out a part of SOURCE although this changes the outputs; the error without it gives NAME.",
)


def add_passes_option(help: str, name: str = "passes", **more: Any) -> Callable[[T], T]:
    """Return the decorator that adds the option of a pipeline."""
    return click.option("-p", "--passes", name, shell_complete=complete_pipelines, help=help, **more)


# The options of loading a compiled folder, or a SOURCE that is compiled first.
add_loading_options = add_options(
    click.option("--threads", type=click.IntRange(1), help="CPU threads; default: OMP_NUM_THREADS, or one per core."),
    click.option("--trust", is_flag=True, help="Run the Python of a folder compiled for PyTorch."),
    click.option("--check", is_flag=True, help="First compare the files of a compiled folder with their checksums."),
    adapter_option,
    without_option,
    target_option("Target for a SOURCE that is not compiled: {targets}; default: ONNX Runtime, if it is available."),
)


def parse_token_ids(ctx: click.Context, option: click.Parameter, text: str | None) -> list[int] | None:
    """Return the token ids in `text`, separated by commas."""
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of token ids such as 1,15,7") from None

"""Shell completion: the script to source, and candidates for sources, targets, passes and names."""

from __future__ import annotations

import importlib
import re
import typing
from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem, get_completion_class

if typing.TYPE_CHECKING:
    from weft.passes import Pass

SHELLS = ("bash", "zsh", "fish")
_OPEN_BRACES = re.compile(r"(.*?)([\w-]+)\{((?:[^{}]*,)?\s*)([^{},]*)", re.DOTALL)  # a pass whose braces are open
_NAME = re.compile(r"\s*[\w.+-]+=")


@click.command("completion", short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete weft's commands, options, targets, presets and passes.

    \b
    Examples:
      eval "$(weft completion bash)"                                  in ~/.bashrc
      eval "$(weft completion zsh)"                                   in ~/.zshrc
      weft completion fish > ~/.config/fish/completions/weft.fish
    """
    completion = get_completion_class(shell)
    assert completion is not None  # click has all of SHELLS
    click.echo(completion(ctx.find_root().command, {}, "weft", "_WEFT_COMPLETE").source())


def _make_items(names: Iterable[str], typed: str, prefix: str = "") -> list[CompletionItem]:
    return [CompletionItem(prefix + name) for name in names if name.startswith(typed)]


def _make_completer(
    module: str, registry: str, order: Callable[[Iterable[str]], Iterable[str]] = list
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return a completer of the names in `module`'s attribute or function `registry`; it imports `module` on use."""

    def complete(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
        names = getattr(importlib.import_module(module), registry)
        return _make_items(order(names() if callable(names) else names), typed)

    return complete


complete_targets = _make_completer("weft.backends.target", "TARGETS")
complete_presets = _make_completer("weft.frontends", "PRESETS")
complete_families = _make_completer("weft.frontends.models.families", "FAMILIES", sorted)
complete_ops = _make_completer("weft.ir", "OPS", sorted)
complete_passes = _make_completer("weft.passes", "all_passes")


def complete_dtypes(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    from weft.backends.target import TARGETS

    target = TARGETS.get(ctx.params.get("target") or "")
    candidates = target.dtypes if target else dict.fromkeys(d for t in TARGETS.values() for d in t.dtypes)
    return _make_items(candidates, typed)


def complete_sources(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return candidates for a source: presets, and paths."""
    return [*complete_presets(ctx, param, typed), CompletionItem(typed, type="file")]


def complete_pipelines(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return candidates for the last pass of a pipeline, perhaps after NAME=, or for its arguments inside braces."""
    from weft.passes import all_passes

    if inside := _OPEN_BRACES.fullmatch(typed):
        prefix, name, arguments, last = inside.groups()
        pass_type = all_passes().get(name)
        names = [] if pass_type is None else _list_arguments(pass_type, arguments)
        return _make_items(names, last, f"{prefix}{name}{{{arguments}")
    prefix, comma, last = typed.rpartition(",")
    name_given = _NAME.match(last)
    stripped = last[name_given.end() if name_given and not comma else 0 :].lstrip(" -")
    return _make_items(("default", *all_passes()), stripped, prefix + comma + last[: len(last) - len(stripped)])


def _list_arguments(pass_type: type[Pass], arguments: str) -> Iterable[str]:
    """Yield NAME=VALUE for each argument of a pass that `arguments` lacks (NAME= if its values are not enumerable)."""
    for argument in pass_type.arguments():
        if not re.search(rf"\b{argument.name}\s*=", arguments):
            values = typing.get_args(argument.type) if typing.get_origin(argument.type) is typing.Literal else ()
            values = ("true", "false") if argument.type is bool else values
            yield from (f"{argument.name}={value}" for value in values or ("",))

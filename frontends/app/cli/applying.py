"""Tables of the options that apply to a kind of model only, or only next to others: elsewhere they are refused.

An option is given when it stands on the command line, with its default value too. One that is in no table here applies
always, or what it is handed to refuses it.
"""

from __future__ import annotations

import click
from click.core import ParameterSource

from weft.ir.errors import WeftError

KINDS = {  # of models, as messages call them
    "decoder": "a decoder",
    "encoder-decoder": "an encoder-decoder of texts",
    "sound": "an encoder-decoder that reads sound",
    "encoder": "an encoder without a head",
    "head": "an encoder with a head",
}
_READING, _EMBEDDING = {"decoder", "encoder-decoder"}, {"encoder", "head"}
_ANSWERING = {*_READING, "sound"}
APPLIES = (  # options of `weft run`, what they do, and the kinds of models that do that
    ("temperature top_k top_p min_p repetition_penalty seed beams", "chooses the tokens of an answer", _ANSWERING),
    ("max_tokens stop", "ends an answer", _ANSWERING),
    ("prompt_lookup_num_tokens assistant", "drafts an answer", _ANSWERING),
    ("experts_on_device", "is for models that answer", _ANSWERING),
    ("chat system", "asks for an answer to a message", _READING),
    ("sound", "is for models that read sound", {"sound"}),
    ("pooling normalize prompt_name truncate_dim", "is for the vector of a text", _EMBEDDING),
    ("pairs", "is a second text for a head", {"head"}),
)
_WORK = "models pipelines weights adapters"
NEEDS = {  # by command and option: options of which one must be given too
    "run": {"system": "chat"},
    "opt": {"trace": "passes", "verify": "passes", "dump_ir": "passes"},
    "export": {"trace": "passes"},
    "eval": {"theme": "plot", "plot": _WORK, "layers": _WORK},
    "inspect": {"target": "weights", "dtype": "parts weights parallel as_json"},
}
EXCLUDES = {  # likewise: options of which none may be given too
    "run": {
        "ids": "prompt chat",
        "sound": "prompt ids chat",
        "pairs": "pooling normalize prompt_name truncate_dim",
    },
}


def check_options(ctx: click.Context) -> None:
    """Check the options that are given to a command against each other.

    Raises:
        UsageError: naming one that goes only with others that are not given, or not with one that is.
    """
    given, flags, command = _given(ctx), _flags(ctx), str(ctx.command.name)
    for name, others in NEEDS.get(command, {}).items():
        if name in given and given.isdisjoint(others.split()):
            known = ", ".join(flags[other] for other in others.split())
            raise click.UsageError(f"{flags[name]} goes with {' or '.join(known.rsplit(', ', 1))}")
    for name, others in EXCLUDES.get(command, {}).items():
        if name in given and (clash := next((other for other in others.split() if other in given), None)):
            raise click.UsageError(f"{flags[name]} does not go with {flags[clash]}: leave out one of them")


def check_applies(source: str, kind: str) -> None:
    """Check that the options that are given to the current command apply to the model `source` of this `kind`.

    Raises:
        WeftError: naming one that does not.
    """
    ctx = click.get_current_context()
    given = _given(ctx)
    for names, what, kinds in APPLIES:
        name = next((name for name in names.split() if name in given), None)
        if name is not None and kind in KINDS and kind not in kinds:
            raise WeftError(f"{_flags(ctx)[name]} {what}, and {source} is {KINDS[kind]}: leave it out")


def kind_of(kind: str, has_head: bool, hears: bool) -> str:
    """Return which of `KINDS` a model is whose manifest or graph states this `kind`."""
    return {"encoder": "head" * has_head, "encoder-decoder": "sound" * hears}.get(kind) or kind


def _given(ctx: click.Context) -> set[str]:
    """Return the names of the parameters on the command line."""
    stated = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return {name for name in ctx.params if ctx.get_parameter_source(name) in stated}


def _flags(ctx: click.Context) -> dict[str, str]:
    """Return what messages call the parameters of a command, by name."""
    return {
        str(param.name): max(param.opts, key=len) if isinstance(param, click.Option) else str(param.name).upper()
        for param in ctx.command.get_params(ctx)
    }

"""Tables of options that apply only to a kind of model, or only together with others; other uses are errors.

An option counts as given if it is on the command line, even with its default value. Options in no table here always
apply, or the function that receives them rejects them.
"""

from __future__ import annotations

import click
from click.core import ParameterSource

from weft.ir.errors import WeftError

KINDS = {  # of models, as named in messages
    "decoder": "a decoder",
    "encoder-decoder": "an encoder-decoder of text",
    "sound": "an encoder-decoder that reads sound",
    "encoder": "an encoder without a head",
    "head": "an encoder with a head",
}
_TEXT_MODELS, _ENCODERS = {"decoder", "encoder-decoder"}, {"encoder", "head"}
_GENERATORS = {*_TEXT_MODELS, "sound"}
APPLIES = (  # options of `weft run`, their effects, and the kinds of models with that effect
    ("temperature top_k top_p min_p repetition_penalty seed beams", "chooses the tokens of an answer", _GENERATORS),
    ("max_tokens stop", "ends an answer", _GENERATORS),
    ("prompt_lookup_num_tokens assistant", "drafts an answer", _GENERATORS),
    ("experts_on_device", "is for models that answer", _GENERATORS),
    ("chat system", "asks for an answer to a message", _TEXT_MODELS),
    ("prefix_cache prompt_lookup", "reuses the caches of earlier tokens", {"decoder"}),
    ("sound", "is for models that read sound", {"sound"}),
    ("pooling normalize prompt_name truncate_dim", "is for the embedding of a sequence", _ENCODERS),
    ("pairs", "is a second text for a head", {"head"}),
)
_VARIANTS = "models pipelines weights adapters"
NEEDS = {  # by command and option: other options, one of which must also be given
    "run": {"system": "chat", "layers": "expose", "out": "expose"},
    "opt": {"trace": "passes", "verify": "passes", "dump_ir": "passes"},
    "export": {"trace": "passes"},
    "compare": {"theme": "plot"},
    "viz": {"javascript": "live", "weights": "live"},
    "certificate": {"moved": "recheck", "trust": "recheck"},
    "eval": {"theme": "plot", "plot": _VARIANTS, "layers": _VARIANTS},
    "inspect": {"target": "weights", "dtype": "parts weights parallel as_json"},
}
EXCLUDES = {  # by command and option: other options that must not be given
    "bisect": {"ids": "prompt"},
    "viz": {
        "live": "other theme scale trust watch",
        "watch": "out other theme scale trust prompt tour",
    },
    "run": {
        "ids": "prompt chat",
        "sound": "prompt ids chat",
        "pairs": "pooling normalize prompt_name truncate_dim",
        # It runs the source once, in ONNX Runtime on the CPU.
        "expose": "chat sound pairs max_tokens stop beams assistant pooling normalize prompt_name truncate_dim target "
        "device threads trust check experts_on_device prefix_cache prompt_lookup_num_tokens seed temperature top_k "
        "top_p min_p repetition_penalty",
    },
}


def check_options(ctx: click.Context) -> None:
    """Raise UsageError if an option of the current command needs another that is missing, or conflicts with one."""
    options, flags, command = _list_given_options(ctx), _map_flags(ctx), str(ctx.command.name)
    for name, related in NEEDS.get(command, {}).items():
        if name in options and options.isdisjoint(related.split()):
            needed = ", ".join(flags[name_of_other] for name_of_other in related.split())
            raise click.UsageError(f"{flags[name]} needs {' or '.join(needed.rsplit(', ', 1))}")
    for name, related in EXCLUDES.get(command, {}).items():
        if name in options and (clash := next((excluded for excluded in related.split() if excluded in options), None)):
            raise click.UsageError(f"{flags[name]} cannot be combined with {flags[clash]}: leave out one of them")


def check_applies(source: str, kind: str) -> None:
    """Raise WeftError if an option of the current command does not apply to `source`, a model of this `kind`."""
    ctx = click.get_current_context()
    options = _list_given_options(ctx)
    for names, effect, kinds in APPLIES:
        name = next((name for name in names.split() if name in options), None)
        if name is not None and kind in KINDS and kind not in kinds:
            raise WeftError(f"{_map_flags(ctx)[name]} {effect}, and {source} is {KINDS[kind]}: leave it out")


def select_kind(kind: str, has_head: bool, hears: bool) -> str:
    """Return the key of `KINDS` for a model of this `kind`, or `kind` if it has none; `hears`: it reads sound."""
    return {"encoder": "head" * has_head, "encoder-decoder": "sound" * hears}.get(kind) or kind


def _list_given_options(ctx: click.Context) -> set[str]:
    """Return the names of the parameters that the command line or the environment sets."""
    stated = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return {name for name in ctx.params if ctx.get_parameter_source(name) in stated}


def _map_flags(ctx: click.Context) -> dict[str, str]:
    """Return parameter name → flag, as messages write it."""
    return {
        str(param.name): max(param.opts, key=len) if isinstance(param, click.Option) else str(param.name).upper()
        for param in ctx.command.get_params(ctx)
    }

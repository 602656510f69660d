"""Checks of graph.meta that was read from a file: anyone may have edited the file, and later stages rely on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from weft.backends.runtime.core.sampler import DEFAULTS
from weft.backends.torch.transformers.embedding import KINDS as EMBEDDING
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.storage.documents import matches_type

from ...dsl.heads import TASKS
from ..hf.folder import SPECIAL_TOKENS


def check_metadata(graph: Graph, name: str) -> None:
    """Raise WeftError if graph.meta, read from the file `name`, has an invalid value for a key in `_CHECKS`."""
    for key, (expected, fits) in _CHECKS.items():
        value = graph.meta.get(key)
        if value is not None and not fits(value):
            raise WeftError(f"{name}: meta {key} = {json.dumps(value)} is not a {expected}")


def _is_token(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_token, value))


def _is_source(value: Any) -> bool:
    expected = {"format": str, "path": str, "adapters": list[str]}
    return isinstance(value, dict) and all(matches_type(value[k], t) for k, t in expected.items() if k in value)


def _is_sentence(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(modules := value.get("modules"), list):
        return False
    valid = all(isinstance(m, dict) and m.get("type") in EMBEDDING and "config" in m for m in modules)
    return valid and isinstance(value.get("max_seq_length"), int | None)


_KINDS = ("decoder", "encoder", "encoder-decoder", "image-encoder", "audio-encoder")
_SAMPLED = {"max_tokens", *DEFAULTS}
_COUNTS = ("vocab", "context", "max_positions", "source_context", "max_source_positions")
_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "kind": (f"kind of model: {', '.join(_KINDS)}", lambda value: value in _KINDS),
    **dict.fromkeys(_COUNTS, ("positive integer", lambda value: _is_token(value) and value > 0)),
    **dict.fromkeys(SPECIAL_TOKENS, ("token", _is_token)),
    "eos_token_ids": ("list of tokens", _is_token_list),
    "task": (f"task: {', '.join(TASKS)}", lambda value: value in TASKS),
    "labels": ("list of names", lambda value: matches_type(value, list[str])),
    "residual_scale": ("positive number", lambda value: type(value) in (int, float) and value > 0),
    "sampling": ("table of sampling defaults by option", lambda v: isinstance(v, dict) and v.keys() <= _SAMPLED),
    "sentence": (f"record of modules: {', '.join(EMBEDDING)}", _is_sentence),
    "source": ("source, which has a format and a path", _is_source),
}

"""The metadata of a graph that is read from text, which anybody may have edited, is what others take it for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from weft.backends.runtime.core.sampling import DEFAULTS
from weft.backends.torch.transformers.embedding import KINDS as EMBEDDING
from weft.ir.errors import WeftError
from weft.ir.graph import Graph

from ...dsl.heads import TASKS
from ..hf.folder import SPECIAL_TOKENS


def check_metadata(graph: Graph, name: str) -> None:
    """Raise WeftError if `graph`, read from `name`, says something of itself that cannot be."""
    for key, (expected, fits) in _FACTS.items():
        value = graph.meta.get(key)
        if value is not None and not fits(value):
            raise WeftError(f"{name}: meta {key} = {json.dumps(value)} is no {expected}")


def _count(value: Any) -> bool:
    return type(value) is int and value > 0


def _token(value: Any) -> bool:
    return type(value) is int and value >= 0


def _tokens(value: Any) -> bool:
    return isinstance(value, list) and all(map(_token, value))


def _source(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(adapters := value.get("adapters", []), list):
        return False
    return all(isinstance(name, str) for name in (value.get("format", ""), value.get("path", ""), *adapters))


def _sentence(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(modules := value.get("modules"), list):
        return False
    sound = all(isinstance(m, dict) and m.get("type") in EMBEDDING and "config" in m for m in modules)
    return sound and isinstance(value.get("max_seq_length"), int | None)


_KINDS = ("decoder", "encoder", "encoder-decoder", "image-encoder", "audio-encoder")
_SAMPLED = {"max_tokens", *DEFAULTS}
_COUNTS = ("vocab", "context", "max_positions", "source_context", "max_source_positions")
_FACTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "kind": (f"kind of model: {', '.join(_KINDS)}", lambda value: value in _KINDS),
    **dict.fromkeys(_COUNTS, ("positive integer", _count)),
    **dict.fromkeys(SPECIAL_TOKENS, ("token", _token)),
    "eos_token_ids": ("list of tokens", _tokens),
    "task": (f"task: {', '.join(TASKS)}", lambda value: value in TASKS),
    "labels": ("list of names", lambda value: isinstance(value, list) and all(isinstance(n, str) for n in value)),
    "residual_scale": ("positive number", lambda value: type(value) in (int, float) and value > 0),
    "sampling": ("defaults of sampling, by option", lambda value: isinstance(value, dict) and value.keys() <= _SAMPLED),
    "sentence": (f"record of modules: {', '.join(EMBEDDING)}", _sentence),
    "source": ("source, which has a format and a path", _source),
}

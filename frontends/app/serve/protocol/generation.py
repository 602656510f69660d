"""Fields that requests for chats and for completions share: sampling, ends, constraints, streams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weft.backends.runtime.core.sampling import Sampling

from .errors import invalid
from .fields import Fields

MOST_STOPS, MOST_CHOICES, MOST_LOGPROBS, MOST_BIASES = 4, 128, 20, 300
ConstraintKind = Literal["json_schema", "regex", "choice", "grammar"]

# Taken and without effect: they are about an account, storage or hints.
IGNORED = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "verbosity"}
SHARED = IGNORED | {
    *("model", "n", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "max_tokens", "logprobs"),
    *("frequency_penalty", "presence_penalty", "logit_bias", "top_k", "min_p", "repetition_penalty"),
    *("structured_outputs", "response_format"),
}


@dataclass(frozen=True)
class ConstraintSpec:
    """A language that answers must belong to, as a request describes it under `param`."""

    kind: ConstraintKind
    value: Any
    param: str


def json_rule(schema: dict[str, Any]) -> str:
    """Return the part of a grammar, in llguidance's variant of Lark, that a JSON schema describes."""
    # No whitespace around JSON: a model that may write any amount of it can go on for ever.
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})}"


@dataclass(frozen=True)
class Generation:
    """The way in which the answers of a request are generated, `logprobs` of the likeliest tokens with each."""

    model: str
    sampling: Sampling
    n: int
    stop: Sequence[str]
    max_tokens: int | None
    stream: bool
    include_usage: bool
    logprobs: int | None
    constraint: ConstraintSpec | None


def read_generation(fields: Fields, logprobs: int | None, max_tokens: int | None) -> Generation:
    """Read the shared fields; `logprobs` and `max_tokens` are read by the caller. Raises ApiError on wrong ones."""
    stream = fields.get("stream", bool, False)
    options = Fields(fields.get("stream_options", dict, {}), "stream_options")
    options.check_known({"include_usage", "include_obfuscation"})
    if fields.given("stream_options") and not stream:
        raise invalid("The 'stream_options' parameter is only allowed when 'stream' is enabled.", "stream_options")
    return Generation(
        model=fields.need("model", str),
        sampling=_sampling(fields),
        n=fields.within("n", 1, MOST_CHOICES, 1),
        stop=fields.texts("stop", MOST_STOPS),
        max_tokens=max_tokens,
        stream=stream,
        include_usage=options.get("include_usage", bool, False),
        logprobs=logprobs,
        constraint=_constraint(fields),
    )


def _sampling(fields: Fields) -> Sampling:
    seed = fields.get("seed", int)
    return Sampling(
        temperature=float(fields.within("temperature", 0.0, 2.0, 1.0)),
        top_p=max(float(fields.within("top_p", 0.0, 1.0, 1.0)), 1e-9),  # 0 is allowed, and takes the likeliest token
        top_k=max(fields.within("top_k", -1, 1 << 31, 0), 0),
        min_p=float(fields.within("min_p", 0.0, 1.0, 0.0)),
        repetition_penalty=float(fields.within("repetition_penalty", 0.01, 100.0, 1.0)),
        frequency_penalty=float(fields.within("frequency_penalty", -2.0, 2.0, 0.0)),
        presence_penalty=float(fields.within("presence_penalty", -2.0, 2.0, 0.0)),
        logit_bias=_logit_bias(fields),
        seed=None if seed is None else seed % (1 << 63),  # negative ones are allowed
    )


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    given = fields.get("logit_bias", dict)
    if not given:
        return None
    if len(given) > MOST_BIASES:
        raise invalid(f"Invalid 'logit_bias': at most {MOST_BIASES} tokens, but {len(given)} given.", "logit_bias")
    biases = Fields(given, "logit_bias")
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid(f"Invalid key in 'logit_bias': {key!r:.40}. Keys are token ids.", "logit_bias")
    return {int(key): float(biases.within(key, -100.0, 100.0) or 0) for key in given}


def _constraint(fields: Fields) -> ConstraintSpec | None:
    outputs = Fields(fields.get("structured_outputs", dict, {}), "structured_outputs")
    outputs.check_known({"regex", "choice", "grammar", "json", "json_object"})
    found = [spec for spec in (_response_format(fields), *_structured(outputs)) if spec is not None]
    if len(found) > 1:
        raise invalid(
            f"Only one constraint is possible, but {' and '.join(s.param for s in found)} are given.", found[1].param
        )
    return found[0] if found else None


def _structured(outputs: Fields) -> list[ConstraintSpec]:
    found = []
    for key in ("regex", "grammar"):
        if outputs.given(key):
            kind: ConstraintKind = "regex" if key == "regex" else "grammar"
            found.append(ConstraintSpec(kind, outputs.get(key, str), outputs.name(key)))
    if outputs.given("choice"):
        texts = outputs.get("choice", list)
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise outputs.wrong_type("choice", "an array of strings, none of them empty")
        found.append(ConstraintSpec("choice", texts, outputs.name("choice")))
    if outputs.given("json"):
        found.append(ConstraintSpec("json_schema", outputs.get("json", dict), outputs.name("json")))
    if outputs.get("json_object", bool, False):
        found.append(ConstraintSpec("json_schema", {"type": "object"}, outputs.name("json_object")))
    return found


def _response_format(fields: Fields) -> ConstraintSpec | None:
    if not fields.given("response_format"):
        return None
    form = Fields(fields.get("response_format", dict), "response_format")
    form.need("type", str)
    kind = form.one_of("type", ("text", "json_object", "json_schema"))
    form.check_known({"type", "json_schema"})
    if kind == "json_object":
        return ConstraintSpec("json_schema", {"type": "object"}, "response_format")
    if kind == "text":
        return None
    named = Fields(form.need("json_schema", dict), "response_format.json_schema")
    named.need("name", str)
    schema = named.get("schema", dict, {"type": "object"})
    return ConstraintSpec("json_schema", schema, "response_format.json_schema.schema")

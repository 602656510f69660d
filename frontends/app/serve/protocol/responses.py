"""Responses of the endpoints: full objects, chunks of streams, log-probabilities, usage."""

from __future__ import annotations

import base64
import codecs
import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weft.backends.runtime.arrays import Floats
from weft.backends.runtime.core.results import Finish, TokenLogprobs

from .tools import ToolCall

TokenBytes = Callable[[int], bytes]
DONE = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # OpenAI's value for the logarithm of 0, which JSON cannot express
ESCAPES = "backslashreplace"  # OpenAI's spelling of incomplete characters
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def format_event(data: dict[str, Any]) -> bytes:
    """Return `data` as a server-sent event, in bytes."""
    return b"data: " + encode_json(data) + b"\n\n"


def encode_json(data: dict[str, Any]) -> bytes:
    """Return `data` as JSON in UTF-8, without spaces."""
    return _ENCODER.encode(data).encode("utf-8", "replace")


class Envelope:
    """The fields that all objects of a reply share; `kind` is chat.completion, text_completion or response."""

    def __init__(self, kind: str, model: str, fingerprint: str) -> None:
        prefix = {"chat.completion": "chatcmpl-", "response": "resp_"}.get(kind, "cmpl-")
        self.id, self.created, self.model = f"{prefix}{uuid.uuid4().hex}", int(time.time()), model
        self._head: dict[str, Any] = {"id": self.id, "object": kind, "created": self.created}
        self._head |= {"model": model, "system_fingerprint": fingerprint}

    def to_object(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the object of a response that is not streamed."""
        return {**self._head, "choices": list(choices), "usage": usage}

    def build_chunk(
        self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None, has_usage: bool
    ) -> dict[str, Any]:
        """Return a chunk of a stream; with `has_usage` it has the field `usage`, null in all chunks except the last."""
        kind = self._head["object"].replace("chat.completion", "chat.completion.chunk")
        return {**self._head, "object": kind, "choices": list(choices), **({"usage": usage} if has_usage else {})}


def build_usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Return the usage object with the token counts of prompt and completion; `cached` tokens of the prompt did not
    run."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


def get_finish_reason(finish: Finish, calls: bool, named: bool) -> str:
    """Return "length" if `finish` is that, "tool_calls" if there are `calls` and no tool was `named`, else "stop"."""
    if finish == "length":
        return "length"
    return "tool_calls" if calls and not named else "stop"


def build_chat_message(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return the assistant message of an answer; next to `calls`, an empty `content` becomes null."""
    message = {"role": "assistant", "content": content, "refusal": None}
    return message | ({"content": content or None, "tool_calls": [call.json() for call in calls]} if calls else {})


def build_chat_delta(content: str, calls: Sequence[ToolCall], first: int) -> dict[str, Any]:
    """Return the delta of a chunk: new content and calls; the message so far has `first` calls."""
    delta: dict[str, Any] = {"content": content} if content else {}
    if calls:
        delta["tool_calls"] = [{"index": index, **call.json()} for index, call in enumerate(calls, first)]
    return delta


def build_chat_logprobs(entries: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the log-probabilities of the tokens `entries` in the format of chat completions."""

    def describe(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token)
        return {"token": raw.decode(errors=ESCAPES), "logprob": max(logprob, MIN_LOGPROB), "bytes": list(raw)}

    content = [{**describe(e.token, e.logprob), "top_logprobs": [describe(*pair) for pair in e.top]} for e in entries]
    return {"content": content, "refusal": None}


class Offsets:
    """Character offsets of tokens in the string that they form."""

    def __init__(self) -> None:
        self._at, self._decoder = 0, codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, raw: bytes) -> int:
        """Return the offset at which the next token, with the bytes `raw`, begins."""
        offset = self._at
        self._at += len(self._decoder.decode(raw))
        return offset


def build_completion_logprobs(
    entries: Sequence[TokenLogprobs], token_bytes: TokenBytes, offsets: Offsets
) -> dict[str, Any]:
    """Return the log-probabilities of a part of a completion; all parts share the character counter `offsets`."""

    def name(token: int) -> str:
        text = token_bytes(token).decode(errors=ESCAPES)
        return text if text.encode() == token_bytes(token) else f"bytes:{text}"

    return {
        "tokens": [name(entry.token) for entry in entries],
        "token_logprobs": [max(entry.logprob, MIN_LOGPROB) for entry in entries],
        "top_logprobs": [{name(token): max(logprob, MIN_LOGPROB) for token, logprob in entry.top} for entry in entries],
        "text_offset": [offsets.advance(token_bytes(entry.token)) for entry in entries],
    }


def build_embeddings(vectors: Sequence[Floats], model: str, tokens: int, as_base64: bool) -> dict[str, Any]:
    """Return the response with `vectors`, as lists or as base64 of little-endian float32."""
    data = []
    for index, vector in enumerate(vectors):
        raw = np.ascontiguousarray(vector, "<f4")
        value = base64.b64encode(raw.tobytes()).decode() if as_base64 else raw.tolist()
        data.append({"object": "embedding", "index": index, "embedding": value})
    counts = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": counts}


def truncate_vector(vector: Floats, dimensions: int) -> Floats:
    """Return the first `dimensions` features of a vector, rescaled to unit length if the vector has unit length."""
    cut, is_unit = vector[:dimensions], abs(np.linalg.norm(vector) - 1) < 1e-3
    return cut / max(np.linalg.norm(cut), np.float32(1e-12)) if is_unit else cut


def describe_model(name: str, created: int, longest: int, parent: str | None) -> dict[str, Any]:
    """Return the record of a model, or of an adapter of the model `parent`. `longest` is the maximum number of tokens
    of prompt and answer together."""
    facts = {"id": name, "object": "model", "created": created, "owned_by": "weft"}
    return {**facts, "max_model_len": longest, "parent": parent}

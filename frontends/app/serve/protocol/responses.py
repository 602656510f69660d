"""Responses of the endpoints: whole objects, chunks of streams, log-probabilities, usage."""

from __future__ import annotations

import base64
import codecs
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.backends.runtime.arrays import Floats
from weft.backends.runtime.core.results import Finish, TokenLogprobs

from .tools import ToolCall

TokenBytes = Callable[[int], bytes]
DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def event(data: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + to_bytes(data) + b"\n\n"


def to_bytes(data: dict[str, Any]) -> bytes:
    """Return JSON in UTF-8, without spaces."""
    return _ENCODER.encode(data).encode("utf-8", "replace")


@dataclass(frozen=True)
class Envelope:
    """The fields that all objects of a response share."""

    kind: str  # chat.completion or text_completion
    model: str
    fingerprint: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(cls, kind: str, model: str, fingerprint: str) -> Envelope:
        """Begin a response."""
        prefix = "chatcmpl" if kind == "chat.completion" else "cmpl"
        return cls(kind, model, fingerprint, f"{prefix}-{uuid.uuid4().hex}")

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the object of a response that is not streamed."""
        return {**self._head(self.kind), "choices": list(choices), "usage": usage}

    def chunk(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None, wanted: bool) -> dict[str, Any]:
        """Return a chunk of a stream; its usage is null until the last one, where it is `wanted`."""
        kind = "chat.completion.chunk" if self.kind == "chat.completion" else self.kind
        return {**self._head(kind), "choices": list(choices), **({"usage": usage} if wanted else {})}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """Return the count of tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def reason(finish: Finish, calls: bool, named: bool) -> str:
    """Return the finish_reason of an answer; of one whose tool was `named` by the request it is stop."""
    if finish == "length":
        return "length"
    return "tool_calls" if calls and not named else "stop"


def chat_message(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return the message of an answer."""
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["tool_calls"] = [call.json() for call in calls]
        message["content"] = content or None
    return message


def chat_delta(content: str, calls: Sequence[ToolCall], first: int) -> dict[str, Any]:
    """Return what a chunk adds to a message, which has `first` calls so far."""
    delta: dict[str, Any] = {"content": content} if content else {}
    if calls:
        delta["tool_calls"] = [{"index": index, **call.json()} for index, call in enumerate(calls, first)]
    return delta


def chat_logprobs(entries: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the log-probabilities of a chat's answer."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token)
        return {"token": _name(raw), "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        {**one(entry.token, entry.logprob), "top_logprobs": [one(*pair) for pair in entry.top]} for entry in entries
    ]
    return {"content": content, "refusal": None}


class Offsets:
    """Offsets of tokens in the text that they make up."""

    def __init__(self) -> None:
        self._at, self._decoder = 0, codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, raw: bytes) -> int:
        """Return where the token of these bytes begins."""
        at = self._at
        self._at += len(self._decoder.decode(raw))
        return at


def completion_logprobs(entries: Sequence[TokenLogprobs], token_bytes: TokenBytes, offsets: Offsets) -> dict[str, Any]:
    """Return the log-probabilities of a part of a completion; `offsets` are those of the whole."""

    def name(raw: bytes) -> str:
        text = _name(raw)
        return text if text.encode() == raw else f"bytes:{text}"

    return {
        "tokens": [name(token_bytes(entry.token)) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            {name(token_bytes(token)): _finite(logprob) for token, logprob in entry.top} for entry in entries
        ],
        "text_offset": [offsets.next(token_bytes(entry.token)) for entry in entries],
    }


def _name(raw: bytes) -> str:
    """Return the text of a token; of a part of a character its bytes as escapes, as OpenAI writes them."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    """Return a log-probability as JSON can write it: OpenAI's own stands in for minus infinity."""
    return max(logprob, -9999.0)


def embeddings(vectors: Sequence[Floats], model: str, tokens: int, as_base64: bool) -> dict[str, Any]:
    """Return the response with vectors, as lists or as base64 of little-endian float32."""
    data = []
    for index, vector in enumerate(vectors):
        raw = np.ascontiguousarray(vector, "<f4")
        value = base64.b64encode(raw.tobytes()).decode() if as_base64 else raw.tolist()
        data.append({"object": "embedding", "index": index, "embedding": value})
    counts = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": counts}


def shortened(vector: Floats, dimensions: int) -> Floats:
    """Return the first `dimensions` numbers of a vector, of unit length if it is, as OpenAI's are."""
    cut, unit = vector[:dimensions], abs(np.linalg.norm(vector) - 1) < 1e-3
    return cut / max(np.linalg.norm(cut), np.float32(1e-12)) if unit else cut


def models(name: str, created: int, longest: int) -> dict[str, Any]:
    """Return the list of models: the one that is served."""
    return {"object": "list", "data": [model(name, created, longest)]}


def model(name: str, created: int, longest: int) -> dict[str, Any]:
    """Return the record of a model, with the most tokens of prompt and answer."""
    return {"id": name, "object": "model", "created": created, "owned_by": "weft", "max_model_len": longest}

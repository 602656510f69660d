"""Response objects: events, chunks, usage, finish reasons, log-probabilities and embeddings, by hand."""

from __future__ import annotations

import base64
import struct

import numpy as np
import pytest

from weft.backends.runtime.core.results import Finish, TokenLogprobs
from weft.frontends.app.serve.protocol.responses import (
    Envelope,
    Offsets,
    build_chat_delta,
    build_chat_logprobs,
    build_chat_message,
    build_completion_logprobs,
    build_embeddings,
    build_usage,
    describe_model,
    encode_json,
    format_event,
    get_finish_reason,
    truncate_vector,
)
from weft.frontends.app.serve.protocol.tools import ToolCall

CALL = ToolCall("square", '{"x": 7}')
BYTES = {1: b"a", 2: "é".encode(), 3: b"\xe9"}  # the last one is no character


def entry(token: int, logprob: float) -> TokenLogprobs:
    return TokenLogprobs(token, logprob, ((token, logprob),))


def test_events_are_compact_json_in_utf_8() -> None:
    assert format_event({"a": "é", "b": [1, 2]}) == 'data: {"a":"é","b":[1,2]}\n\n'.encode()
    assert encode_json({"half": "\ud83d"}) == b'{"half":"?"}'  # half of a surrogate pair


@pytest.mark.parametrize(("kind", "prefix"), [("chat.completion", "chatcmpl-"), ("text_completion", "cmpl-")])
def test_envelope_shares_its_head_among_object_and_chunks(kind: str, prefix: str) -> None:
    envelope, usage = Envelope(kind, "tiny", "fp_1"), build_usage(3, 4, 2)
    assert usage.pop("prompt_tokens_details") == {"cached_tokens": 2}
    assert usage == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    full, chunk, last = (
        envelope.to_object([{}], usage),
        envelope.build_chunk([{}], None, True),
        envelope.build_chunk([], usage, True),
    )
    assert full["id"].startswith(prefix) and full["id"] == chunk["id"] and full["object"] == kind
    assert chunk["object"] == ("chat.completion.chunk" if kind == "chat.completion" else kind)
    assert (chunk["usage"], last["usage"], last["choices"]) == (None, usage, [])
    assert "usage" not in envelope.build_chunk([{}], None, False)


@pytest.mark.parametrize(
    ("finish", "calls", "named", "reason"),
    [
        ("length", True, False, "length"),
        ("stop", False, False, "stop"),
        ("stop_string", False, False, "stop"),
        ("stop", True, False, "tool_calls"),
        ("stop", True, True, "stop"),  # as OpenAI reports a named function
    ],
)
def test_finish_reason(finish: Finish, calls: bool, named: bool, reason: str) -> None:
    assert get_finish_reason(finish, calls, named) == reason


def test_messages_and_deltas_hold_tool_calls() -> None:
    assert build_chat_message("", []) == {"role": "assistant", "content": "", "refusal": None}
    message = build_chat_message("", [CALL])
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "square", "arguments": '{"x": 7}'}
    delta = build_chat_delta("so", [CALL, CALL], first=3)
    assert delta["content"] == "so" and [call["index"] for call in delta["tool_calls"]] == [3, 4]
    assert build_chat_delta("", [], 0) == {}


def test_chat_logprobs_escape_incomplete_characters_and_bound_infinity() -> None:
    content = build_chat_logprobs([entry(2, -0.5), entry(3, -np.inf)], BYTES.__getitem__)["content"]
    assert [(e["token"], e["logprob"], e["bytes"]) for e in content] == [
        ("é", -0.5, [0xC3, 0xA9]),
        ("\\xe9", -9999.0, [0xE9]),
    ]
    assert content[0]["top_logprobs"] == [{"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]}]


def test_completion_logprobs_share_offsets_in_characters() -> None:
    offsets = Offsets()
    first = build_completion_logprobs([entry(2, -1.0), entry(1, -2.0)], BYTES.__getitem__, offsets)
    assert first["tokens"] == ["é", "a"] and first["text_offset"] == [0, 1]
    assert first["token_logprobs"] == [-1.0, -2.0] and first["top_logprobs"] == [{"é": -1.0}, {"a": -2.0}]
    rest = build_completion_logprobs([entry(3, -np.inf)], BYTES.__getitem__, offsets)
    assert (rest["tokens"], rest["text_offset"], rest["token_logprobs"]) == (["bytes:\\xe9"], [2], [-9999.0])


def test_embeddings_are_lists_or_base64_of_little_endian_floats() -> None:
    vectors = [np.array([1.5, -2.0], np.float32)]
    (item,) = build_embeddings(vectors, "tiny", 5, as_base64=False)["data"]
    assert item == {"object": "embedding", "index": 0, "embedding": [1.5, -2.0]}
    response = build_embeddings(vectors, "tiny", 5, as_base64=True)
    assert base64.b64decode(response["data"][0]["embedding"]) == struct.pack("<2f", 1.5, -2.0)
    assert response["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


def test_truncated_unit_vectors_are_rescaled_and_others_are_not() -> None:
    np.testing.assert_allclose(truncate_vector(np.array([0.6, 0.0, 0.8], np.float32), 2), [1, 0])
    np.testing.assert_array_equal(truncate_vector(np.array([3, 4, 5], np.float32), 2), [3, 4])
    assert np.isfinite(truncate_vector(np.array([0, 0, 1], np.float32), 2)).all()


def test_model_record_states_its_maximum_length() -> None:
    record = describe_model("mine", 9, 768, "tiny")
    assert (record["id"], record["object"], record["created"], record["max_model_len"]) == ("mine", "model", 9, 768)
    assert record["parent"] == "tiny"

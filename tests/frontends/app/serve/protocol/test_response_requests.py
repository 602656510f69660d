"""Items of the Responses API as messages of chats."""

from __future__ import annotations

from typing import Any

import pytest

from weft.frontends.app.serve.protocol.errors import ApiError
from weft.frontends.app.serve.protocol.response_requests import Message, ResponseRequest, join_calls, read_item


def call(number: int) -> Message:
    return read_item({"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"})


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}),
        (
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "logprobs": []}]},
            {"role": "assistant", "content": [{"type": "text", "text": "a", "logprobs": []}]},
        ),
        (
            {"type": "function_call_output", "call_id": "c1", "output": "4"},
            {"role": "tool", "tool_call_id": "c1", "content": "4"},
        ),
    ],
)
def test_item_is_a_message(item: Any, message: Message) -> None:
    assert read_item(item) == message


def test_calls_join_the_message_that_they_follow() -> None:
    said, asked = {"role": "assistant", "content": "so"}, {"role": "user", "content": "hi"}
    joined = join_calls([asked, said, call(1), call(2), asked, call(3)])
    assert [m["role"] for m in joined] == ["user", "assistant", "user", "assistant"]
    assert [[c["id"] for c in m.get("tool_calls", [])] for m in joined] == [[], ["c1", "c2"], [], ["c3"]]
    assert joined[1]["content"] == "so" and "tool_calls" not in said


def test_request_becomes_one_for_a_chat() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    request = ResponseRequest.read(
        {
            "model": "m",
            "input": "hi",
            "instructions": "Be brief.",
            "max_output_tokens": 5,
            "text": {"format": form},
            "tools": [tool],
            "tool_choice": {"type": "function", "name": "f"},
            "reasoning": {"effort": "low"},
            "user": "someone",
        }
    )
    chat = request.to_chat(request.input)
    assert chat["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert chat["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }
    assert chat["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert chat["tool_choice"] == {"function": {"name": "f"}}
    assert (chat["max_tokens"], chat["reasoning_effort"], chat["model"]) == (5, "low", "m")
    echo = request.echo()
    assert echo["text"] == {"format": form} and not {"input", "stream"} & echo.keys()


def test_unknown_item_is_refused() -> None:
    with pytest.raises(ApiError, match="expected a message, function_call or function_call_output"):
        ResponseRequest.read({"model": "m", "input": [{"type": "image_generation_call"}]})

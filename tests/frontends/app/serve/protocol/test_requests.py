"""Requests: their bodies, sampling options, constraints and messages."""

from __future__ import annotations

from typing import Any

import pytest

from weft.frontends.app.serve.protocol.errors import ApiError
from weft.frontends.app.serve.protocol.requests import MAX_VALUES, ChatRequest, CompletionRequest, Message, parse_body
from weft.frontends.app.serve.protocol.tools import ToolChoice
from weft.frontends.app.serve.server import Server

from ..serving import refusal


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"hi"', b"\xff", b"[" * 5000, b'{"a": 1} more'])
def test_bodies_other_than_json_objects_are_refused(server: Server, body: bytes) -> None:
    assert "could not parse the JSON body" in refusal(server, "completions", body)["message"]


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.read({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})


def complete(**fields: Any) -> CompletionRequest:
    return CompletionRequest.read({"model": "m", "prompt": "hi", **fields})


def test_sampling_options_have_the_defaults_of_openai_and_are_normalized() -> None:
    assert (chat().sampling.temperature, chat().sampling.top_p, chat().sampling.seed) == (1.0, 1.0, None)
    request = chat(top_k=-1, top_p=0, seed=-1, logit_bias={"7": -100}, stop="end", user="me", temperature=None)
    sampling = request.sampling
    assert (sampling.top_k, sampling.top_p, sampling.seed) == (0, 1e-9, 2**63 - 1)  # off, greedy, not negative
    assert sampling.logit_bias == {7: -100.0} and request.stop == ["end"]


def test_newer_names_of_chat_options_come_first() -> None:
    request = chat(max_tokens=3, max_completion_tokens=5, logprobs=True, reasoning_effort="low")
    assert (request.max_tokens, request.top_logprobs) == (5, 0)
    assert request.chat_template_kwargs == {"reasoning_effort": "low"} and chat().top_logprobs is None


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({}, None, None),
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            "json_schema",
            {"type": "null"},
        ),
        ({"structured_outputs": {"regex": "[ab]"}}, "regex", "[ab]"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"json": {"type": "null"}}}, "json_schema", {"type": "null"}),
    ],
)
def test_constraint_of_a_request(fields: dict[str, Any], kind: str | None, value: Any) -> None:
    spec = chat(**fields).constraint
    assert (spec and spec.kind, spec and spec.value) == (kind, value)


def test_several_constraints_are_refused() -> None:
    with pytest.raises(ApiError, match=r"response_format and structured_outputs\.regex") as refused:
        chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
    assert refused.value.param == "structured_outputs.regex"


def test_tool_choice() -> None:
    tools = [{"type": "function", "function": {"name": "square"}}]
    named = {"type": "function", "function": {"name": "square"}}
    assert chat().choice == ToolChoice("none") and chat(tools=tools).choice == ToolChoice("auto")
    assert chat(tools=tools, tool_choice="none").choice.mode == "none"
    assert chat(tools=tools, tool_choice=named).choice == ToolChoice("named", "square", parallel=False)
    with pytest.raises(ApiError, match="only allowed when 'tools' are specified"):
        _ = chat(tool_choice="required").choice


def test_messages_are_rendered_for_chat_templates() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert Message.render({"role": "developer", "content": parts}) == {"role": "system", "content": "a\nb"}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    (rendered,) = Message.render({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert rendered["function"] == {"name": "f", "arguments": {"x": 1}}
    call["function"] = {"name": "f", "arguments": "not json"}
    (rendered,) = Message.render({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert rendered["function"]["arguments"] == "not json"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", [3]], ["a", [3]])],
)
def test_single_prompts_become_a_list(prompt: Any, prompts: list[Any]) -> None:
    assert complete(prompt=prompt).prompt == prompts
    assert (complete().max_tokens, complete(logprobs=2).top_logprobs) == (16, 2)


def test_body_must_be_a_json_object_of_limited_size() -> None:
    assert parse_body(b'{"a": [1, null]}') == {"a": [1, None]}
    with pytest.raises(ApiError, match="could not parse the JSON body") as refused:
        parse_body(b"[" + b"1," * (MAX_VALUES + 1) + b"1]")
    assert (refused.value.status, refused.value.param) == (400, None)

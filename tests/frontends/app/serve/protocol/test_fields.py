"""Fields of requests that are missing, unknown or invalid: errors name them."""

from __future__ import annotations

from typing import Any

import pytest

from weft.frontends.app.serve.server import Server

from ..serving import CHAT, TEXT, refusal

UNBOUND = {"role": "tool", "content": "2"}


WRONG: list[tuple[str, dict[str, Any], str | None, str]] = [  # path, fields, the parameter at fault, code
    *(("chat/completions", {"temperature": value}, "temperature", "invalid_value") for value in (-0.1, 2.1)),
    ("chat/completions", {"temperature": "hot"}, "temperature", "invalid_type"),
    ("chat/completions", {"temperature": True}, "temperature", "invalid_type"),
    ("chat/completions", {"top_p": 1.5}, "top_p", "invalid_value"),
    ("chat/completions", {"n": 0}, "n", "invalid_value"),
    ("chat/completions", {"n": 1.5}, "n", "invalid_type"),
    ("chat/completions", {"n": 129}, "n", "invalid_value"),
    ("chat/completions", {"max_tokens": 0}, "max_tokens", "invalid_value"),
    ("chat/completions", {"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
    ("chat/completions", {"stop": ["a"] * 5}, "stop", "invalid_value"),
    ("chat/completions", {"stop": ""}, "stop", "invalid_value"),
    ("chat/completions", {"stop": [1]}, "stop", "invalid_type"),
    ("chat/completions", {"seed": "x"}, "seed", "invalid_type"),
    ("chat/completions", {"frequency_penalty": 3}, "frequency_penalty", "invalid_value"),
    ("chat/completions", {"presence_penalty": -3}, "presence_penalty", "invalid_value"),
    ("chat/completions", {"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
    ("chat/completions", {"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ("chat/completions", {"logprobs": 3}, "logprobs", "invalid_type"),
    ("chat/completions", {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ("chat/completions", {"functions": [{}]}, "functions", "unsupported_parameter"),
    ("chat/completions", {"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    ("chat/completions", {"temprature": 1}, "temprature", "unknown_parameter"),
    ("chat/completions", {"temprature": None}, "temprature", "unknown_parameter"),
    ("chat/completions", {"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "missing_required_parameter"),
    ("chat/completions", {f"field {i}": 1 for i in range(200)}, None, "invalid_value"),
    (
        "chat/completions",
        {"stream": True, "stream_options": {"usage": True}},
        "stream_options.usage",
        "unknown_parameter",
    ),
    ("chat/completions", {"logit_bias": {str(i): "x" for i in range(301)}}, "logit_bias", "invalid_value"),
    ("chat/completions", {"messages": "hi"}, "messages", "invalid_type"),
    ("chat/completions", {"messages": None}, "messages", "missing_required_parameter"),
    ("chat/completions", {"messages": []}, "messages", "invalid_value"),
    ("chat/completions", {"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ("chat/completions", {"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter"),
    ("chat/completions", {"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role", "invalid_value"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
    ("chat/completions", {"messages": [{"role": "user", "content": True}]}, "messages[0].content", "invalid_type"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
        "invalid_value",
    ),
    ("chat/completions", {"messages": [UNBOUND]}, "messages[0].tool_call_id", "missing_required_parameter"),
    ("chat/completions", {"model": None}, "model", "missing_required_parameter"),
    ("completions", {"prompt": None}, "prompt", "missing_required_parameter"),
    ("completions", {"prompt": ""}, "prompt", "invalid_value"),
    ("completions", {"prompt": []}, "prompt", "invalid_value"),
    ("completions", {"prompt": [[1], "a", 3]}, "prompt", "invalid_type"),
    ("completions", {"prompt": [1, 2.0]}, "prompt", "invalid_type"),
    ("completions", {"prompt": [[1, True]]}, "prompt", "invalid_type"),
    ("completions", {"prompt": {"a": 1}}, "prompt", "invalid_type"),
    ("completions", {"suffix": "end"}, "suffix", "unsupported_parameter"),
    ("completions", {"best_of": 3}, "best_of", "unsupported_parameter"),
    ("completions", {"echo": True, "logprobs": 1}, "echo", "invalid_value"),
    ("completions", {"prompt": ["a"] * 20, "n": 20}, "n", "invalid_value"),
]


@pytest.mark.halved
@pytest.mark.parametrize(("path", "fields", "param", "code"), WRONG)
def test_errors_name_the_wrong_field(
    server: Server, path: str, fields: dict[str, Any], param: str | None, code: str
) -> None:
    error = refusal(server, path, {**(CHAT if path.startswith("chat") else TEXT), **fields})
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert error["message"]

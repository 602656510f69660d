"""Requests that are refused: the status, the words and the field; and failures of which clients learn no details."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from weft.frontends.app.serve.server import Server
from weft.ir.errors import WeftError

from .serving import CONTEXT, NAME, held, http, prompt, served, until
from .serving import client as official

CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT: dict[str, Any] = {"model": NAME, "prompt": "hi", "max_tokens": 4}


def refusal(server: Server, path: str, body: Any, status: int = 400, **options: Any) -> dict[str, Any]:
    """The error object of a request that is refused with `status`."""
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    options.setdefault("headers", {"content-type": "application/json"})
    with http(server) as plain:
        response = plain.post(f"/v1/{path}", **given, **options)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "Traceback" not in response.text
    return error


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


@pytest.mark.parametrize(("path", "fields", "param", "code"), WRONG)
def test_wrong_fields_are_named(
    server: Server, path: str, fields: dict[str, Any], param: str | None, code: str
) -> None:
    error = refusal(server, path, {**(CHAT if path.startswith("chat") else TEXT), **fields})
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"hi"', b"\xff", b"[" * 5000, b'{"a": 1} more'])
def test_bodies_that_are_no_object_are_refused(server: Server, body: bytes) -> None:
    assert "could not parse the JSON body" in refusal(server, "completions", body)["message"]


def test_tokens_outside_of_the_vocabulary_are_refused(server: Server) -> None:
    for ids in ([300], [-1], [1 << 70]):
        for echo in (False, True):
            error = refusal(server, "completions", {**TEXT, "prompt": ids, "echo": echo})
            assert "token ids must be from 0 to 257" in error["message"] and error["param"] == "prompt"


def test_prompts_longer_than_the_context_are_refused_in_the_words_of_openai(server: Server) -> None:
    error = refusal(server, "completions", {**TEXT, "prompt": "a" * (CONTEXT + 1)})
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    assert error["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens. However, your prompt")
    long = [{"role": "user", "content": "a" * CONTEXT}]
    with official(server) as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=NAME, messages=long)  # type: ignore[arg-type]  # a plain dict will do
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "messages"
    assert refusal(server, "completions", {**TEXT, "prompt": "a" * CONTEXT, "max_tokens": -1})["param"] == "max_tokens"


def test_other_models_paths_and_methods(server: Server) -> None:
    error = refusal(server, "chat/completions", {**CHAT, "model": "gpt-4o"}, 404)
    assert error["code"] == "model_not_found" and "`gpt-4o`" in error["message"]
    assert refusal(server, "images", {}, 404)["message"] == "Invalid URL (POST /v1/images)"
    with http(server) as plain:
        response = plain.get("/v1/chat/completions")
        assert response.status_code == 405 and "Not allowed to GET" in response.json()["error"]["message"]
        assert plain.get("/").status_code == 404


def test_a_template_that_refuses_is_quoted_without_paths(folder: Path, tmp_path: Path) -> None:
    from .serving import compiled

    own = compiled(tmp_path / "refusing", "{{ raise_exception('roles must alternate') }}")
    with served(own) as server:
        error = refusal(server, "chat/completions", CHAT)
    assert "roles must alternate" in error["message"] and str(tmp_path) not in error["message"]


def test_a_model_without_a_template_refuses_chats(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from .serving import compiled

    with served(compiled(tmp_path / "plain", None)) as server:
        assert "use /v1/completions" in refusal(server, "chat/completions", CHAT)["message"]
    assert "chats are refused" in caplog.text and "no chat template" in caplog.text


def test_large_bodies_and_other_types_are_refused(folder: Path) -> None:
    with served(folder, max_body=1000) as server:
        assert "maximum of 1000 bytes" in refusal(server, "completions", {**TEXT, "prompt": "a" * 2000}, 413)["message"]
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            raw = json.dumps(TEXT).encode()
            assert refusal(server, "completions", raw, 415, headers={"content-type": kind})["message"]


def test_keys(folder: Path) -> None:
    with served(folder, api_key="a-secret") as server:
        for key in ("another", "a-secre", "a-secrets"):
            with official(server, key) as client, pytest.raises(openai.AuthenticationError) as refused:
                client.models.list()
            assert refused.value.code == "invalid_api_key" and "a-secret" not in str(refused.value).replace(key, "")
        with official(server, "a-secret") as client:
            assert client.completions.create(**TEXT).choices
        with http(server) as plain:
            assert plain.get("/health").status_code == 200
            for path in ("/metrics", "/v1/models", "/nothing"):
                response = plain.get(path)
                assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert plain.get("/v1/models", headers={"authorization": "Basic a-secret"}).status_code == 401


def test_names_that_lead_here_by_dns_alone_are_refused(folder: Path) -> None:
    with served(folder, hosts=frozenset({"localhost", "127.0.0.1"})) as server, http(server) as plain:
        here = f"127.0.0.1:{server.port}"
        for host, status in (("evil.example", 403), ("localhost:80", 200), (here, 200), ("", 403)):
            assert plain.get("/v1/models", headers={"host": host}).status_code == status


def test_a_full_queue_refuses(folder: Path) -> None:
    """One answer runs, two wait, and there is no room for a fourth."""
    with served(folder, max_batch=1, max_queue=2) as server, ThreadPoolExecutor(4) as threads:

        def ask(number: int) -> str:
            with official(server) as client:
                return client.completions.create(**{**TEXT, "prompt": prompt(number)}).choices[0].text

        with held(server) as hold:
            worker = server.service.worker
            asking = [threads.submit(ask, 0)]
            until(lambda: worker.n_waiting == 1)
            hold.step()
            until(lambda: worker.n_running == 1)
            for number in (1, 2):
                asking.append(threads.submit(ask, number))
                until(lambda: worker.n_waiting == len(asking) - 1)
            error = refusal(server, "completions", TEXT, 429)
            assert error["code"] == "rate_limit_exceeded" and "queue" in error["message"]
            with http(server) as plain:
                assert plain.post("/v1/completions", json=TEXT).headers["retry-after"] == "1"
        assert all(isinstance(answer.result(60), str) for answer in asking)
        assert ask(4) is not None


def test_a_model_that_fails_tells_clients_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(folder) as server, official(server) as client:
        batch: Any = server.service.worker
        advance = batch._batch.advance
        for error in (WeftError("/secret/model.onnx: broken"), KeyError("secret")):

            def fail(error: Exception = error) -> None:
                raise error

            batch._batch.advance = fail
            with pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(**TEXT)
            assert refused.value.type == "server_error" and "secret" not in str(refused.value)
            with client.completions.create(**TEXT, stream=True) as stream, pytest.raises(openai.APIError) as streamed:
                list(stream)
            assert "secret" not in str(streamed.value)
            assert "secret" in caplog.text  # the log tells
            batch._batch.advance = advance
            assert client.completions.create(**TEXT).choices[0].text is not None


def test_a_defect_tells_clients_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(folder) as server:
        monkeypatch.setattr(server.service, "start_completions", None)
        error = refusal(server, "completions", TEXT, 500)
    assert error["message"] == "The server had an error while processing your request."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("in_time", [False, True])
def test_the_end_of_the_server(folder: Path, stream: bool, in_time: bool) -> None:
    """Running answers may end, waiting ones are refused; those that do not end in time are told so."""
    drain = 30 if in_time else 0.2
    with served(folder, max_batch=1, drain=drain) as server, ThreadPoolExecutor(2) as threads:
        worker = server.service.worker

        def ask(number: int) -> str:
            with official(server) as client:
                found: Any = client.completions.create(**{**TEXT, "prompt": prompt(number)}, stream=stream)
                return "".join(c.choices[0].text for c in found) if stream else str(found.choices[0].text)

        with held(server) as hold:
            asking = [threads.submit(ask, 0)]
            until(lambda: worker.n_waiting == 1)
            hold.step()
            until(lambda: worker.n_running == 1)
            asking.append(threads.submit(ask, 1))
            until(lambda: worker.n_waiting == 1)
            server.stop()
            until(lambda: server.service.closing if in_time else cast(Any, worker)._ended)
        for number, answer in enumerate(asking):
            if in_time and number == 0:
                assert isinstance(answer.result(60), str)
                continue
            with pytest.raises(openai.APIError, match="shutting down"):
                answer.result(60)

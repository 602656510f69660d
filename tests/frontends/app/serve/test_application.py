"""Requests that are refused: the status, the words and the field; and failures of which clients learn no details."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from weft.frontends.app.serve.server import Server
from weft.ir.errors import WeftError

from .serving import CHAT, CONTEXT, NAME, TEXT, held, http, prompt, refusal, served, until
from .serving import client as official


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


def test_other_models_paths_and_methods_are_refused(server: Server) -> None:
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


def test_requests_need_the_api_key(folder: Path) -> None:
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


def test_unknown_host_names_are_refused(folder: Path) -> None:
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


def test_model_errors_are_logged_and_not_sent_to_clients(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(folder) as server, official(server) as client:
        batch: Any = server.service.worker
        advance = batch._batches[""].advance
        for error in (WeftError("/secret/model.onnx: broken"), KeyError("secret")):

            def fail(error: Exception = error) -> None:
                raise error

            batch._batches[""].advance = fail
            with pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(**TEXT)
            assert refused.value.type == "server_error" and "secret" not in str(refused.value)
            with client.completions.create(**TEXT, stream=True) as stream, pytest.raises(openai.APIError) as streamed:
                list(stream)
            assert "secret" not in str(streamed.value)
            assert "secret" in caplog.text  # the log tells
            batch._batches[""].advance = advance
            assert client.completions.create(**TEXT).choices[0].text is not None


def test_internal_errors_are_not_sent_to_clients(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(folder) as server:
        monkeypatch.setattr(server.service, "start_completions", None)
        error = refusal(server, "completions", TEXT, 500)
    assert error["message"] == "The server had an error while processing your request."

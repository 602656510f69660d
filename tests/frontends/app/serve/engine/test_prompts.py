"""Requests whose preparation takes long or fails: they are refused with a reason, and nobody waits for them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from weft.frontends.app.serve.engine import prompts
from weft.frontends.app.serve.server import Server

from ..serving import post_completion, served, until

DOUBLING = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(5000)) + '\nr5000: "a"\nstart: r0'  # exhausts the stack
NESTED: dict[str, Any] = {"type": "string"}
for _ in range(80):
    NESTED = {"type": "array", "items": NESTED}


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"choice": [f"text{i}" for i in range(70_000)]}, "the maximum is 262144"),
        (
            {"json": {"properties": {f"property {i}": {"type": "string"} for i in range(10_000)}}},
            "the maximum is 262144",
        ),
        ({"grammar": DOUBLING}, "too large, or nested too deep"),
        ({"grammar": "start: " + '"a" ' * 65_000}, "oo many"),
        ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "nested"),
        ({"grammar": "start: \x00"}, "Invalid"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"json": {"$ref": "#"}}, "NoExtension"),
        ({"json": {"allOf": [{"pattern": "["}]}}, "regex"),
    ],
)
def test_constraints_that_cannot_be_followed_are_refused_with_the_reason(
    server: Server, constraint: dict[str, Any], reason: str
) -> None:
    for stream in (False, True):
        answer = post_completion(server, structured_outputs=constraint, stream=stream)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"].startswith("structured_outputs."), error
        assert reason in error["message"] and len(error["message"]) < 800
        assert not any(word in error["message"] for word in ("backtrace", "<unknown>", "Traceback", "\n"))


def test_other_requests_do_not_wait_for_large_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the lane of large requests stands still, others are answered; beyond a number, large ones are refused."""
    begun, free, real = threading.Event(), threading.Event(), prompts.PromptEncoder._encode

    def encode(self: prompts.PromptEncoder, text: str, special: bool) -> list[int]:
        begun.set()
        assert free.wait(60)
        return real(self, text, special)

    monkeypatch.setattr(prompts.PromptEncoder, "_encode", encode)
    monkeypatch.setattr(prompts, "MAX_LARGE", 2)
    long = "y" * 2 * prompts.LARGE_INPUT
    with served(folder) as server, ThreadPoolExecutor(3) as clients:
        waiting = [clients.submit(post_completion, server, prompt=long) for _ in range(3)]
        assert begun.wait(60)
        until(lambda: server.service.prompts._large == 3)
        assert post_completion(server).status_code == 200
        assert post_completion(server, structured_outputs={"regex": "[ab]"}).json()["choices"][0]["text"] in "ab"
        assert post_completion(server, prompt=long).status_code == 429
        free.set()
        for future in waiting:
            error = future.result().json()["error"]
            assert (
                error["code"] == "context_length_exceeded"
                and f"in {2 * prompts.LARGE_INPUT} tokens" in error["message"]
            )


def test_a_full_queue_refuses_before_it_prepares(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.frontends.app.serve.engine.jobs import QueueFull

    def full(jobs: int) -> None:
        raise QueueFull("full")

    with served(folder) as server:
        monkeypatch.setattr(server.service.worker, "check_room", full)
        monkeypatch.setattr(server.service.prompts, "run", None)
        assert post_completion(server).status_code == 429
        assert post_completion(server, prompt="y" * 2 * prompts.LARGE_INPUT).status_code == 429


@pytest.mark.parametrize("how", ["text", "grammar"])
def test_shutdown_does_not_wait_for_large_requests(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """It gives up the work of its processes, however long that may take."""
    monkeypatch.setattr(prompts, "ENCODE_LIMIT", 600.0)
    monkeypatch.setattr(prompts, "LONG_LIMIT", 600.0)
    choices = {"structured_outputs": {"choice": [f"{i}" for i in range(20_000)]}}
    fields: dict[str, Any] = {"prompt": "1" * 4_000_000} if how == "text" else choices
    with ThreadPoolExecutor(1) as client:
        with served(folder, drain=0.0) as server:
            answer = client.submit(post_completion, server, **fields)
            until(lambda: server.service.prompts._large == 1)
            until(lambda: bool(server.service.prompts._workers._renderers))
        assert answer.result().status_code in (503, 400)


def test_slow_grammar_is_retried_among_large_requests_then_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def ask(self: prompts.PromptEncoder, seconds: float, what: str, request: dict[str, Any]) -> Any:
        seen.append(seconds)
        raise prompts.TooSlow

    monkeypatch.setattr(prompts.PromptEncoder, "_ask", ask)
    with served(folder) as server:
        message = post_completion(server, structured_outputs={"regex": "a"}).json()["error"]["message"]
    assert seen == [prompts.SHORT_LIMIT, prompts.LONG_LIMIT] and "takes longer than 3 seconds" in message

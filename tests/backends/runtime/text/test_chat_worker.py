"""The script that renders chat templates: its sandbox, its errors, and its frames."""

from __future__ import annotations

import io
import json
import warnings
from typing import Any

import pytest

from weft.backends.runtime.text import chat_worker
from weft.backends.runtime.text.chat_worker import answer_request, render_template, serve_requests


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ items | tojson }}", '["ä", "<b>"]'),  # neither escaped for HTML nor for ASCII
        ("{% for i in items %}{% if loop.index == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "ä"),
        ("{% generation %}{{ items[1] }}{% endgeneration %}", "<b>"),
        ("{{ strftime_now('%%') }}", "%"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),  # blocks leave no blank lines
    ],
)
def test_templates_render_as_hugging_face_does(template: str, text: str) -> None:
    assert render_template(template, {"items": ["ä", "<b>"]}) == {"text": text}


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% if %}", "cannot be parsed: Expected an expression, got 'end of statement block'"),
        ("{{ raise_exception('no tools') }}", "refuses the messages: no tools"),
        ("{{ items[0] / 0 }}", "refuses the messages: TypeError: unsupported operand type(s) for /: 'str' and 'int'"),
        ("{{ items.append(1) }}", "refuses the messages: access to attribute 'append' of 'list' object is unsafe"),
        ("{{ items.__class__.__base__ }}", "refuses the messages: access to attribute '__class__' of"),
    ],
)
def test_failures_are_clauses(template: str, error: str) -> None:
    reply = render_template(template, {"items": ["ä"]})
    assert reply.keys() == {"error"} and reply["error"].startswith(error)


def test_long_prompts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_worker, "LONGEST", 9)
    assert render_template("{{ 'x' * 9 }}", {}) == {"text": "x" * 9}
    assert render_template("{{ 'x' * 10 }}", {}) == {"error": "makes a prompt of 10 characters, more than 9"}


def test_limits_are_set_before_the_template_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    monkeypatch.setattr(chat_worker, "limit_process", lambda *limits: order.append(limits))
    monkeypatch.setattr(chat_worker, "render_template", lambda *given: order.append(given) or {"text": "done"})
    request = {"seconds": 2, "memory": 99, "template": "{{ a }}", "variables": {"a": 1}}
    assert json.loads(answer_request(json.dumps(request).encode())) == {"text": "done"}
    assert order == [(2, 99), ("{{ a }}", {"a": 1})]


def test_each_frame_is_answered_in_a_fork() -> None:
    def answer(raw: bytes) -> str:
        if raw == b"fail":
            raise SystemExit
        return raw.decode().upper()

    frames = [b"ab", b"", b"fail", "ä".encode()]
    requests = io.BytesIO(b"".join(len(raw).to_bytes(8, "little") + raw for raw in frames) + b"cut")
    replies = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the test's process has threads, the worker has none
        serve_requests(requests, replies, answer)
    found, data = [], replies.getvalue()
    while data:
        size = int.from_bytes(data[:8], "little")
        found.append(json.loads(data[8 : 8 + size]))
        data = data[8 + size :]
    assert [reply["status"] for reply in found] == [0, 0, 1, 0]
    assert [reply["reply"] for reply in found] == ["AB", "", "", "Ä"]

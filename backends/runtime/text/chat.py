"""Chat templates: the jinja2 text that turns messages into a prompt, as Hugging Face renders it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.ir.documents import Record, read_text
from weft.ir.errors import WeftError

Message = Mapping[str, Any]
SECONDS = 2  # that a template may take
MEMORY = 512 << 20  # bytes of addresses, the interpreter's own included
STARTED = 60  # seconds until the process must have begun and ended, on the slowest machine


class ChatTemplate:
    """The chat_template.jinja of a compiled folder, or the one in its tokenizer_config.json.

    The template comes from wherever the model came from: it runs in jinja2's immutable sandbox, in a process that may
    take 2 seconds and 512 MiB.
    Raises WeftError when the folder has none, or its file is no text.
    """

    def __init__(self, folder: Path) -> None:
        config_path = folder / "tokenizer_config.json"
        config = Record.read(config_path) if config_path.is_file() else Record(config_path, {})
        own = folder / "chat_template.jinja"
        self._path, source = (own, read_text(own)) if own.is_file() else (config_path, _default(config))
        if source is None:
            raise WeftError(
                f"{folder}: no chat template, in chat_template.jinja or tokenizer_config.json: prompt it plainly"
            )
        self._source = source
        self._tokens = {key: _token(value) for key, value in config.data.items() if key.endswith("_token")}

    def render(self, messages: Sequence[Message], *, answer: bool = True, **variables: Any) -> str:
        """The prompt of `messages`, ending where the assistant's answer begins when `answer`.

        `variables` (tools, documents, enable_thinking …) are handed to the template as JSON is.
        Raises WeftError when the messages are malformed, the template cannot be parsed or refuses them, or it takes
        more time or memory than it may.
        """
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise WeftError(f"a chat message is {message!r}, but it must be a mapping with a role and its content")
        known = {"tools": None, "documents": None, **self._tokens, **variables}
        known |= {"messages": list(messages), "add_generation_prompt": answer}
        try:
            limits = {"seconds": SECONDS, "memory": MEMORY}
            request = json.dumps({**limits, "template": self._source, "variables": known}, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise WeftError(f"the messages and variables of a chat must be plain data, as JSON is: {error}") from error
        reply = _ask(request.encode(), str(self._path))
        if "text" not in reply:
            raise WeftError(f"{self._path}: the chat template {reply['error']}")
        return reply["text"]


def _ask(request: bytes, name: str) -> dict[str, str]:
    """Have a request answered in a process of its own. Raises WeftError when that does not end well."""
    # -P keeps the worker's folder off the module path: files in it have names that others import
    command = [sys.executable, "-P", str(Path(__file__).with_name("chat_worker.py"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=STARTED, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WeftError(f"{name}: the chat template cannot be rendered in a process of its own: {error}") from error
    # The timer ends the worker by SIGALRM, the limit of CPU time by SIGXCPU or SIGKILL.
    if done.returncode in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL):
        raise WeftError(f"{name}: the chat template takes longer than {SECONDS} seconds")
    try:
        reply: dict[str, str] = json.loads(done.stdout)
    except ValueError:
        why = (done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise WeftError(f"{name}: the chat template cannot be rendered: its process ended with {why}") from None
    return reply


def _default(config: Record) -> str | None:
    """Return the template of a tokenizer_config.json, which may name several."""
    if isinstance(config.data.get("chat_template"), list):
        named = {entry.text("name"): entry.text("template") for entry in config.records("chat_template")}
        return named.get("default")
    template: str | None = config.text("chat_template", None)
    return template


def _token(value: Any) -> Any:
    """The text of a token that is written as text or as a described one."""
    return value.get("content") if isinstance(value, dict) else value


def _plain(value: Any) -> Any:
    """Convert other mappings and sequences to the dicts and lists that JSON has."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is not")

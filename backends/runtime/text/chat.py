"""Chat templates: the jinja2 text that turns messages into a prompt, as Hugging Face renders it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

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
    That process is begun for each prompt, unless a `renderer` is given that lives on.
    Raises WeftError when the folder has none, or its file is no text.
    """

    def __init__(self, folder: Path) -> None:
        self.renderer: Renderer | None = None
        config_path = folder / "tokenizer_config.json"
        config = Record.read(config_path) if config_path.is_file() else Record(config_path, {})
        own = folder / "chat_template.jinja"
        self._path, source = (own, read_text(own)) if own.is_file() else (config_path, _default(config))
        if source is None:
            raise WeftError(
                f"{folder}: no chat template, in chat_template.jinja or tokenizer_config.json: prompt it plainly"
            )
        self.source = source
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
            request = json.dumps({**limits, "template": self.source, "variables": known}, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise WeftError(f"the messages and variables of a chat must be plain data, as JSON is: {error}") from error
        try:
            ask = _ask_once if self.renderer is None else self.renderer.ask
            status, text, words = ask(request.encode())
        except (OSError, subprocess.TimeoutExpired) as error:
            raise WeftError(
                f"{self._path}: the chat template cannot be rendered in a process of its own: {error}"
            ) from error
        reply = _reply(str(self._path), status, text, words)
        if "text" not in reply:
            raise WeftError(f"{self._path}: the chat template {reply['error']}")
        return reply["text"]


def special_token(folder: Path, name: str) -> str | None:
    """The token that tokenizer_config.json or special_tokens_map.json calls `name` (mask_token); None if none does."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / file).is_file() and (found := Record.read(folder / file).data.get(name)) is not None:
            return str(_token(found))
    return None


class Renderer:
    """A process that renders templates, each in a fork with the limits of one: Python starts once, not for each prompt.

    A context manager; not for several threads at a time.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; the next prompt begins another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None

    def ask(self, request: bytes) -> tuple[int, bytes, bytes]:
        """Answer a request: the status of its fork, what it wrote, and no error messages.

        Raises OSError when the process cannot be begun or ends.
        """
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _begin("--serve", errors=subprocess.DEVNULL)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(len(request).to_bytes(8, "little") + request)
            self._process.stdin.flush()
            reply = json.loads(self._read(int.from_bytes(self._read(8), "little")))
        except BaseException:  # what is left in its pipes belongs to this request
            self.close()
            raise
        return reply["status"], reply["reply"].encode(), b""

    def _read(self, size: int) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        out, read = self._process.stdout.fileno(), b""
        while len(read) < size:
            ready, _, _ = select.select([out], [], [], STARTED)
            piece = os.read(out, size - len(read)) if ready else b""
            if not piece:
                raise OSError("it ended" if ready else "it does not answer")
            read += piece
        return read


def _begin(*arguments: str, errors: int) -> subprocess.Popen[bytes]:
    """Begin a process of the worker, with pipes for all but its `errors`."""
    # -P keeps the worker's folder off the module path: files in it have names that others import
    command = [sys.executable, "-P", str(Path(__file__).with_name("chat_worker.py")), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=errors)


def _ask_once(request: bytes) -> tuple[int, bytes, bytes]:
    """Answer a request in a process of its own: its status, what it wrote, and its error messages."""
    with _begin(errors=subprocess.PIPE) as process:
        try:
            written, words = process.communicate(request, timeout=STARTED)
        except BaseException:
            process.kill()
            raise
    return process.returncode, written, words


def _reply(name: str, status: int, written: bytes, words: bytes) -> dict[str, str]:
    """The reply that a worker has `written`. Raises WeftError when it did not end well."""
    # The timer ends the worker by SIGALRM, the limit of CPU time by SIGXCPU or SIGKILL.
    if status in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL):
        raise WeftError(f"{name}: the chat template takes longer than {SECONDS} seconds")
    try:
        reply: dict[str, str] = json.loads(written)
    except ValueError:
        why = (words.decode(errors="replace").strip().splitlines() or [f"status {status}"])[-1]
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

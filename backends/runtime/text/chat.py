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

from weft.ir.errors import WeftError
from weft.ir.storage.documents import Record, read_json, read_text

Message = Mapping[str, Any]
SECONDS = 2  # that a template may take
MEMORY = 512 << 20  # bytes of addresses, the interpreter's own included
FURTHER = "additional_chat_templates"  # the folder of named templates
EXTRA = ("extra_special_tokens", "additional_special_tokens")  # the name today, and the one of transformers 4
_REASONING = ("reasoning_content", "thinking", "reasoning")
WORKER = Path(__file__).with_name("chat_worker.py")
STARTED = 60  # seconds until the process must have begun and ended, on the slowest machine


class ChatTemplate:
    """The chat templates of a compiled folder: the one called tool_use where tools are given, else the default.

    The template comes from wherever the model came from: it runs in jinja2's immutable sandbox, in a process that may
    take 2 seconds and 512 MiB.
    That process is begun for each prompt, unless a `renderer` is given that lives on.
    Raises WeftError when the folder has none, or its file is no text.
    """

    def __init__(self, folder: Path) -> None:
        self.renderer: Renderer | None = None
        self._path, self._templates = read_templates(folder)
        if not self._templates:
            raise WeftError(
                f"{folder}: no chat template, in chat_template.jinja or tokenizer_config.json: prompt it plainly"
            )
        if not {"default", "tool_use"} & self._templates.keys():
            raise WeftError(f"{self._path}: no chat template is called default, only {', '.join(self._templates)}")
        tokens = {key: text_of(value) for key, value in special_tokens(folder).items() if key.endswith("_token")}
        self._tokens = {key: text for key, text in tokens.items() if text is not None}

    @property
    def source(self) -> str:
        """The template that renders conversations with tools."""
        return self._templates.get("tool_use") or self._templates["default"]

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
        known |= {"messages": list(map(_normalized, messages)), "add_generation_prompt": answer}
        named = "tool_use" if known["tools"] is not None and "tool_use" in self._templates else "default"
        if named not in self._templates:
            raise WeftError(f"{self._path}: its only chat template is for tools, and none are given")
        try:
            limits = {"seconds": SECONDS, "memory": MEMORY}
            request = json.dumps({**limits, "template": self._templates[named], "variables": known}, default=_plain)
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
            return text_of(found)
    return None


class Renderer:
    """A process that renders templates, each in a fork with the limits of one: Python starts once, not for each prompt.

    A context manager; not for several threads at a time. `command`: a script with its arguments that answers other
    requests in the same way (see `serve` of chat_worker).
    """

    def __init__(self, command: Sequence[str | Path] = (WORKER, "--serve")) -> None:
        self._command, self._killed = command, False
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; the next prompt begins another."""
        if self._process is not None:
            self._end()
            self._process.communicate()
        self._process = None

    def kill(self) -> None:
        """End the process for good, from any thread: the request under way, and all others, raise OSError."""
        self._killed = True
        self._end()

    def _end(self) -> None:
        if (process := self._process) is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    def ask(self, request: bytes) -> tuple[int, bytes, bytes]:
        """Answer a request: the status of its fork, what it wrote, and no error messages.

        Raises OSError when the process cannot be begun or ends.
        """
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _begin(self._command, errors=subprocess.DEVNULL)
        try:
            if self._killed:  # looked at when there is a process: `kill` has seen it, or is seen here
                raise OSError("it was ended")
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


def _begin(script: Sequence[str | Path], errors: int) -> subprocess.Popen[bytes]:
    """Begin a process of a `script` with its arguments, with pipes for all but its `errors`."""
    # -P keeps the worker's folder off the module path: files in it have names that others import
    command = [sys.executable, "-P", *map(str, script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    # In a group of its own, which can be killed as a whole, and which the Ctrl-C of a terminal does not reach.
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)


def _ask_once(request: bytes) -> tuple[int, bytes, bytes]:
    """Answer a request in a process of its own: its status, what it wrote, and its error messages."""
    with _begin([WORKER], errors=subprocess.PIPE) as process:
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


def read_templates(folder: Path) -> tuple[Path, dict[str, str]]:
    """Return the chat templates of the tokenizer in `folder` by name, and the file of the first.

    As in transformers, files of templates count before tokenizer_config.json; the chat_template.json of a processor
    counts where there is nothing else.
    """
    further, own = folder / FURTHER, folder / "chat_template.jinja"
    files = {"default": own} if own.is_file() else {}
    files |= {path.stem: path for path in sorted(further.glob("*.jinja"))}
    if files:
        return next(iter(files.values())), {name: read_text(path) for name, path in files.items()}
    config = folder / "tokenizer_config.json"
    for path in (config, folder / "chat_template.json"):
        templates = _templates_in(Record.read(path)) if path.is_file() else {}
        if templates:
            return path, templates
    return config, {}


def _templates_in(config: Record) -> dict[str, str]:
    """The templates of a config by name, which may have one, a list, or an object of several."""
    template = config.data.get("chat_template")
    if isinstance(template, list):
        return {entry.text("name"): entry.text("template") for entry in config.records("chat_template")}
    if isinstance(template, dict):
        named: dict[str, str] = config.get("chat_template", dict[str, str])
        return named
    return {} if template is None else {"default": config.text("chat_template")}


def special_tokens(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json of `folder`; special_tokens_map.json counts where it lists no tokens, as in
    transformers."""
    config, older = (folder / name for name in ("tokenizer_config.json", "special_tokens_map.json"))
    known: dict[str, Any] = read_json(config) if config.is_file() else {}
    if "added_tokens_decoder" in known or not older.is_file():
        return known
    more: dict[str, Any] = read_json(older)
    extra = next((known[key] for key in EXTRA if known.get(key)), None)
    if isinstance(extra, list):
        extra = [*extra, *(more.get(EXTRA[0]) or [])]
    return {**known, **more} if extra is None else {**known, **more, EXTRA[0]: extra}


def text_of(token: Any) -> str | None:
    """Return the text of a special token that is written as text or as a described one; None if it is neither."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _normalized(message: Message) -> dict[str, Any]:
    """Leave out keys without a value, and give reasoning every name that templates know, as transformers does."""
    known = {key: value for key, value in message.items() if value is not None}
    reasoning = next((known[key] for key in _REASONING if key in known), None)
    return known if reasoning is None else {"thinking": reasoning, **known, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Convert other mappings and sequences to the dicts and lists that JSON has."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is not")

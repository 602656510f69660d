"""Chat templates in jinja2, which render messages to a prompt as Hugging Face does."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.storage.documents import Record, read_json, read_text

Message = Mapping[str, Any]
SECONDS = 2  # time limit of a template
MEMORY = 512 << 20  # limit of the address space in bytes, the interpreter included
TEMPLATE_FOLDER = "additional_chat_templates"  # the folder of named templates
EXTRA = ("extra_special_tokens", "additional_special_tokens")  # the current name, and that of transformers 4
_REASONING = ("reasoning_content", "thinking", "reasoning")
WORKER = Path(__file__).with_name("chat_worker.py")
START_SECONDS = 60  # seconds for the process to start and answer, on the slowest machine


class ChatTemplate:
    """The chat templates of a compiled folder: "tool_use" renders prompts with tools, "default" all others. A template
    is untrusted, like the model: it runs in jinja2's immutable sandbox, in a process limited to 2 seconds and 512 MiB.
    Each prompt starts a new process unless `renderer` is set, which stays alive. Raises WeftError when the folder has
    neither of the two templates, or its file is not text."""

    def __init__(self, folder: Path) -> None:
        self.renderer: Renderer | None = None
        self._path, self._templates = read_templates(folder)
        if not self._templates:
            raise WeftError(
                f"{folder}: no chat template in chat_template.jinja or tokenizer_config.json: use prompts, not messages"
            )
        if not {"default", "tool_use"} & self._templates.keys():
            raise WeftError(
                f"{self._path}: its chat templates are {', '.join(self._templates)}, but one must be called default"
            )
        tokens = {key: get_token_text(value) for key, value in read_special_tokens(folder).items()}
        self._tokens = {key: text for key, text in tokens.items() if key.endswith("_token") and text is not None}

    @property
    def source(self) -> str:
        """Return the text of the template that renders conversations with tools: "tool_use", else "default"."""
        return self._templates.get("tool_use") or self._templates["default"]

    def render(self, messages: Sequence[Message], *, answer: bool = True, **variables: Any) -> str:
        """Return `messages` rendered to a prompt; with `answer`, it ends where the assistant's answer begins.
        `variables` (tools, documents, enable_thinking …) are passed to the template and must be JSON data. Raises
        WeftError when the messages are malformed, no template fits, or it cannot be parsed, rejects the messages, or
        exceeds its limits of time and memory."""
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise WeftError(f"a chat message is {message!r}, but it must be a mapping with a role and its content")
        context = {"tools": None, "documents": None, **self._tokens, **variables}
        context |= {"messages": list(map(_normalize_message, messages)), "add_generation_prompt": answer}
        named = "tool_use" if context["tools"] is not None and "tool_use" in self._templates else "default"
        if named not in self._templates:
            raise WeftError(f"{self._path}: the only chat template is for tools: pass tools, or add a default template")
        try:
            request = {"seconds": SECONDS, "memory": MEMORY, "template": self._templates[named], "variables": context}
            request_json = json.dumps(request, default=_convert_for_json)
        except (TypeError, ValueError, RecursionError) as error:
            raise WeftError(f"the messages and variables of a chat must be JSON data: {error}") from error
        try:
            ask = _ask_once if self.renderer is None else self.renderer.send_request
            status, text, words = ask(request_json.encode())
        except (OSError, subprocess.TimeoutExpired) as error:
            raise WeftError(
                f"{self._path}: the chat template cannot be rendered by another process: {error}"
            ) from error
        reply = _parse_reply(str(self._path), status, text, words)
        if "text" not in reply:
            raise WeftError(f"{self._path}: the chat template {reply['error']}")
        return reply["text"]


def read_special_token(folder: Path, name: str) -> str | None:
    """Return the text of the special token `name` (such as "mask_token") from tokenizer_config.json in `folder`, else
    from special_tokens_map.json; None if neither file has it."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / file).is_file() and (token := Record.read(folder / file).data.get(name)) is not None:
            return get_token_text(token)
    return None


class Renderer(AbstractContextManager["Renderer"]):
    """A worker process that renders each template in a fork with its own limits, so that Python starts only once. It is
    a context manager, and not thread-safe except for `kill`. `command` is the worker's script with its arguments; a
    script for other requests must use the protocol of `chat_worker.serve_requests`."""

    def __init__(self, command: Sequence[str | Path] = (WORKER, "--serve")) -> None:
        self._command, self._killed = command, False
        self._process: subprocess.Popen[bytes] | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; the next request starts a new process."""
        if self._process is not None:
            self._kill_process()
            self._process.communicate()
        self._process = None

    def kill(self) -> None:
        """End the process, from any thread; the current request and all later requests raise OSError."""
        self._killed = True
        self._kill_process()

    def _kill_process(self) -> None:
        if (process := self._process) is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    def send_request(self, request: bytes) -> tuple[int, bytes, bytes]:
        """Send a request; return (exit status of its fork, its output, b"" for its error output). Raises OSError if the
        process cannot be started, ends or does not answer within a minute."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _start_process(self._command, errors=subprocess.DEVNULL)
        try:
            if self._killed:  # checked after the process exists: a concurrent `kill` ends it or is noticed here
                raise OSError("it was ended")
            assert self._process.stdin is not None
            self._process.stdin.write(len(request).to_bytes(8, "little") + request)
            self._process.stdin.flush()
            reply = json.loads(self._read_bytes(int.from_bytes(self._read_bytes(8), "little")))
        except BaseException:  # the remaining bytes in its pipes belong to this request
            self.close()
            raise
        return reply["status"], reply["reply"].encode(), b""

    def _read_bytes(self, size: int) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        out, read = self._process.stdout.fileno(), b""
        while len(read) < size:
            ready, _, _ = select.select([out], [], [], START_SECONDS)
            piece = os.read(out, size - len(read)) if ready else b""
            if not piece:
                raise OSError(f"the process {'ended' if ready else 'does not answer'}")
            read += piece
        return read


def _start_process(script: Sequence[str | Path], errors: int) -> subprocess.Popen[bytes]:
    """Start Python on `script` (path and arguments) with pipes; stderr goes to `errors`, as in subprocess."""
    # -P keeps the worker's folder off the module path: its file names would shadow imported modules
    command = [sys.executable, "-P", *map(str, script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    # In its own process group, which can be killed with all its forks, and which Ctrl-C in a terminal does not reach.
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)


def _ask_once(request: bytes) -> tuple[int, bytes, bytes]:
    """Send a request to a new worker process; return (its exit status, its output, its error output)."""
    with _start_process([WORKER], errors=subprocess.PIPE) as process:
        try:
            written, words = process.communicate(request, timeout=START_SECONDS)
        except BaseException:
            process.kill()
            raise
    return process.returncode, written, words


def _parse_reply(name: str, status: int, written: bytes, words: bytes) -> dict[str, str]:
    """Return the reply of a worker, given its exit status, its output `written` and its error output `words`. Raises
    WeftError that begins with `name` if the worker timed out or crashed."""
    # The timer ends the worker by SIGALRM, the limit of CPU time by SIGXCPU or SIGKILL.
    if status in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL):
        raise WeftError(f"{name}: the chat template takes longer than {SECONDS} seconds")
    try:
        return dict(json.loads(written))
    except ValueError:
        why = (words.decode(errors="replace").strip().splitlines() or [f"status {status}"])[-1]
        raise WeftError(f"{name}: the chat template cannot be rendered: its process ended with {why}") from None


def read_templates(folder: Path) -> tuple[Path, dict[str, str]]:
    """Return (path, templates): the chat templates in `folder`, keyed by name, and the path of the file with the first.
    As in transformers, template files take precedence over tokenizer_config.json, and that over the chat_template.json
    of a processor. Without templates, the path is that of tokenizer_config.json and the dict is empty."""
    further, default = folder / TEMPLATE_FOLDER, folder / "chat_template.jinja"
    files = {"default": default} if default.is_file() else {}
    files |= {path.stem: path for path in sorted(further.glob("*.jinja"))}
    if files:
        return next(iter(files.values())), {name: read_text(path) for name, path in files.items()}
    config = folder / "tokenizer_config.json"
    for path in (config, folder / "chat_template.json"):
        templates = _parse_templates(Record.read(path)) if path.is_file() else {}
        if templates:
            return path, templates
    return config, {}


def _parse_templates(config: Record) -> dict[str, str]:
    """Return a dict from name to template of a config; {} if it has none. The value of chat_template is a string
    (called "default"), a list of objects with name and template, or an object from names to templates."""
    template = config.data.get("chat_template")
    if isinstance(template, list):
        return {entry.text("name"): entry.text("template") for entry in config.records("chat_template")}
    if isinstance(template, dict):
        return dict(config.get("chat_template", dict[str, str]))
    return {} if template is None else {"default": config.text("chat_template")}


def read_special_tokens(folder: Path) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json in `folder` ({} if missing). Without added_tokens_decoder in them,
    entries of special_tokens_map.json replace equal keys, but lists of extra tokens are joined, as in transformers."""
    config, older = (folder / name for name in ("tokenizer_config.json", "special_tokens_map.json"))
    config_entries: dict[str, Any] = read_json(config) if config.is_file() else {}
    if "added_tokens_decoder" in config_entries or not older.is_file():
        return config_entries
    map_entries: dict[str, Any] = read_json(older)
    extra = next((config_entries[key] for key in EXTRA if config_entries.get(key)), None)
    if isinstance(extra, list):
        extra = [*extra, *(map_entries.get(EXTRA[0]) or [])]
    return {**config_entries, **map_entries} if extra is None else {**config_entries, **map_entries, EXTRA[0]: extra}


def get_token_text(token: Any) -> str | None:
    """Return the text of a special token, a string or a mapping with "content"; None for any other value."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _normalize_message(message: Message) -> dict[str, Any]:
    """Return `message` without None; its reasoning is in both "thinking" and "reasoning_content" of templates."""
    entries = {key: value for key, value in message.items() if value is not None}
    reasoning = next((entries[key] for key in _REASONING if key in entries), None)
    return entries if reasoning is None else {"thinking": reasoning, **entries, "reasoning_content": reasoning}


def _convert_for_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"they hold a value of type {type(value).__name__}")

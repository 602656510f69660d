"""Chat templates: the jinja2 text that turns messages into a prompt, as Hugging Face renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError

from .folder import read_json

Message = Mapping[str, Any]


class ChatTemplate:
    """The chat_template.jinja of a compiled folder, or the one in its tokenizer_config.json.

    The template runs in jinja2's immutable sandbox: it comes from wherever the model came from.
    Raises WeftError when the folder has none, or it cannot be parsed.
    """

    def __init__(self, folder: Path) -> None:
        import jinja2

        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path) if config_path.is_file() else {}
        own = folder / "chat_template.jinja"
        self._path, source = (
            (own, own.read_text(encoding="utf-8")) if own.is_file() else (config_path, _default(config))
        )
        if source is None:
            raise WeftError(
                f"{folder}: no chat template, in chat_template.jinja or tokenizer_config.json: prompt it plainly"
            )
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise WeftError(f"{self._path}: the chat template cannot be parsed: {error}") from error
        self._tokens = {key: _token(value) for key, value in config.items() if key.endswith("_token")}

    def render(self, messages: Sequence[Message], *, answer: bool = True, **variables: Any) -> str:
        """The prompt of `messages`, ending where the assistant's answer begins when `answer`.

        `variables` (tools, documents, enable_thinking …) are handed to the template.
        Raises WeftError when the messages are malformed, or the template refuses them.
        """
        import jinja2

        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise WeftError(f"a chat message is {message!r}, but it must be a mapping with a role and its content")
        known = {"tools": None, "documents": None, **self._tokens, **variables}
        try:
            return str(self._template.render(messages=list(messages), add_generation_prompt=answer, **known))
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise WeftError(f"{self._path}: the chat template refuses the messages: {error}") from error


def _default(config: Mapping[str, Any]) -> str | None:
    """The template of a tokenizer_config.json, which may name several."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _token(value: Any) -> Any:
    """The text of a token that is written as text or as a described one."""
    return value.get("content") if isinstance(value, dict) else value


@cache
def _environment() -> Any:
    """Templates as Hugging Face compiles them: the sandbox, its filters and functions, `{% generation %}` blocks."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's tokens for training; here its body is all that matters."""

        tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment

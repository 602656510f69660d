"""Requests of the endpoints, checked: what is wrong in one is told by its field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.storage.documents import parse_json

from .errors import invalid
from .fields import Fields
from .generation import IGNORED, MOST_CHOICES, MOST_LOGPROBS, SHARED, Generation, read_generation
from .tools import ToolChoice, read_tools

Prompt = str | list[int]
MOST_INPUTS = 2048  # of a request for embeddings, as OpenAI has it
MOST_VALUES = 1_000_000  # in a body
ROLES = ("system", "developer", "user", "assistant", "tool")
_CHAT = SHARED | {
    *("messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"),
    *("reasoning_effort", "modalities", "audio", "prediction", "web_search_options", "functions", "function_call"),
    "chat_template_kwargs",
}
_COMPLETIONS = SHARED | {"prompt", "suffix", "best_of", "echo"}
_EMBEDDINGS = IGNORED | {"model", "input", "encoding_format", "dimensions"}


def read_body(raw: bytes) -> dict[str, Any]:
    """Return the object in a body. Raises ApiError where it holds none."""
    try:
        body: dict[str, Any] = parse_json(raw, "the body of the request", values=MOST_VALUES)
    except WeftError as error:
        raise invalid(f"We could not parse the JSON body of your request: {error}", None, None) from None
    return body


@dataclass(frozen=True)
class ChatRequest:
    """A request for the next message of a conversation; `variables` are those of the chat template."""

    generation: Generation
    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    tool_choice: ToolChoice
    variables: dict[str, Any]

    @classmethod
    def read(cls, data: dict[str, Any]) -> ChatRequest:
        """Read a body. Raises ApiError on wrong or unsupported fields."""
        fields = Fields(data)
        fields.check_known(_CHAT)
        fields.only("modalities", ["text"])
        for name in ("audio", "prediction", "web_search_options", "functions", "function_call"):
            fields.only(name)
        logprobs = fields.get("logprobs", bool, False)
        top = fields.within("top_logprobs", 0, MOST_LOGPROBS)
        if top is not None and not logprobs:
            raise invalid("The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.", "top_logprobs")
        longest = fields.within("max_tokens", 1, 1 << 31)
        longest = fields.within("max_completion_tokens", 1, 1 << 31, longest)
        generation = read_generation(fields, (top or 0) if logprobs else None, longest)
        tools, choice = read_tools(fields)
        if choice.forced and generation.constraint is not None:
            raise invalid("A forced tool call leaves no room for another constraint.", generation.constraint.param)
        variables = fields.get("chat_template_kwargs", dict, {})
        for name in variables.keys() & {"messages", "tools", "add_generation_prompt"}:
            raise invalid(f"'chat_template_kwargs' cannot set {name}.", "chat_template_kwargs")
        if fields.given("reasoning_effort"):
            variables = {"reasoning_effort": fields.get("reasoning_effort", str), **variables}
        messages = fields.need("messages", list)
        if not messages:
            raise invalid("Invalid 'messages': empty array. Expected at least one message.", "messages")
        return cls(
            generation, [_message(m, f"messages[{i}]") for i, m in enumerate(messages)], tools, choice, variables
        )


def _message(message: Any, name: str) -> dict[str, Any]:
    """Return a message as chat templates take it: text as one string, arguments of tool calls as objects."""
    if not isinstance(message, dict):
        raise invalid(f"Invalid type for '{name}': expected an object.", name, "invalid_type")
    fields = Fields(message, name)
    fields.need("role", str)
    role = fields.one_of("role", ROLES)
    content = _content(fields)
    read: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if fields.given("name"):
        read["name"] = fields.get("name", str)
    if role == "tool":
        read["tool_call_id"] = fields.need("tool_call_id", str)
    if role == "assistant" and fields.given("tool_calls"):
        calls = enumerate(fields.get("tool_calls", list))
        read["tool_calls"] = [_tool_call(call, f"{name}.tool_calls[{i}]") for i, call in calls]
    elif content is None:
        raise invalid(f"Invalid value for '{name}.content': expected a string, got null.", f"{name}.content")
    return read


def _content(fields: Fields) -> str | None:
    if not isinstance(parts := fields.raw("content"), list):
        content: str | None = fields.get("content", str)
        return content
    texts = []
    for i, part in enumerate(parts):
        name = f"{fields.name('content')}[{i}]"
        if not isinstance(part, dict):
            raise invalid(f"Invalid type for '{name}': expected an object.", name, "invalid_type")
        inner = Fields(part, name)
        if (kind := inner.need("type", str)) != "text":
            raise invalid(f"This model takes text only, but '{name}' is of type {kind!r:.40}.", name)
        texts.append(inner.need("text", str))
    return "\n".join(texts)


def _tool_call(call: Any, name: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise invalid(f"Invalid type for '{name}': expected an object.", name, "invalid_type")
    fields = Fields(call, name)
    function = Fields(fields.need("function", dict), f"{name}.function")
    arguments = function.get("arguments", str, "{}")
    try:
        read: Any = parse_json(arguments, function.name("arguments"), values=MOST_VALUES)
    except WeftError:
        read = arguments  # what a model has said before need not be JSON
    called = {"name": function.need("name", str), "arguments": read}
    return {"id": fields.get("id", str, ""), "type": "function", "function": called}


@dataclass(frozen=True)
class CompletionRequest:
    """A request for continuations of `prompts`: texts or token ids."""

    generation: Generation
    prompts: Sequence[Prompt]
    echo: bool

    @classmethod
    def read(cls, data: dict[str, Any]) -> CompletionRequest:
        """Read a body. Raises ApiError on wrong or unsupported fields."""
        fields = Fields(data)
        fields.check_known(_COMPLETIONS)
        fields.only("suffix", "")
        logprobs = fields.within("logprobs", 0, MOST_LOGPROBS)
        generation = read_generation(fields, logprobs, fields.within("max_tokens", 1, 1 << 31, 16))
        fields.only("best_of", 1, generation.n)
        prompts = _prompts(data, "prompt")
        if len(prompts) * generation.n > MOST_CHOICES:
            raise invalid(f"At most {MOST_CHOICES} choices in all: fewer prompts, or a smaller 'n'.", "n")
        echo = fields.get("echo", bool, False)
        if echo and logprobs is not None:
            raise invalid("Log-probabilities of prompts are not supported: ask for 'echo' or 'logprobs'.", "echo")
        return cls(generation, prompts, echo)


@dataclass(frozen=True)
class EmbeddingRequest:
    """A request for the vectors of `inputs`: texts or token ids."""

    model: str
    inputs: Sequence[Prompt]
    base64: bool
    dimensions: int | None

    @classmethod
    def read(cls, data: dict[str, Any]) -> EmbeddingRequest:
        """Read a body. Raises ApiError on wrong or unsupported fields."""
        fields = Fields(data)
        fields.check_known(_EMBEDDINGS)
        form = fields.one_of("encoding_format", ("float", "base64"), "float")
        inputs = _prompts(data, "input")
        if len(inputs) > MOST_INPUTS:
            raise invalid(f"Invalid 'input': at most {MOST_INPUTS} inputs, but {len(inputs)} given.", "input")
        return cls(fields.need("model", str), inputs, form == "base64", fields.within("dimensions", 1, 1 << 31))


def _prompts(data: dict[str, Any], key: str) -> list[Prompt]:
    """Return the prompts of a field: a text, token ids, or an array of either."""
    fields = Fields(data)
    if not fields.given(key):
        fields.need(key, str)
    value = data[key]
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not all(isinstance(p, str) or _is_ids(p) for p in prompts):
        raise fields.wrong_type(key, "a string, an array of strings, or token ids")
    if not all(prompts):
        raise invalid(f"Invalid '{key}': it holds an empty prompt.", key)
    if not prompts:
        raise invalid(f"Invalid '{key}': empty array.", key)
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)

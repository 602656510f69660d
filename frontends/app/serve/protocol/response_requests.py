"""Requests of OpenAI's Responses API, which become requests for chats; those check all that both have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from .fields import IGNORED, Count, Items, RequestObject, allow_only

Message = dict[str, Any]  # of a chat
PARAMETERS = {  # of chats, and their names in requests for responses
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
}


def read_item(item: Any) -> Message:
    """Return an item of an input or output as a message of a chat."""
    kind = item.get("type") or "message" if isinstance(item, dict) else ""
    match kind:
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        case "message":
            parts = item.get("content")
            if isinstance(parts, list):
                texts = ("input_text", "output_text")
                parts = [p | {"type": "text"} if isinstance(p, dict) and p.get("type") in texts else p for p in parts]
            return {"role": item.get("role"), "content": parts}
    raise PydanticCustomError("part", "expected a message, function_call or function_call_output")


def join_calls(messages: Iterable[Message]) -> list[Message]:
    """Return `messages` with tool calls joined to the message of the assistant that they follow."""
    joined = list[Message]()
    for message in messages:
        last = joined[-1] if joined else {}
        if "tool_calls" in message and last.get("role") == "assistant":
            joined[-1] = {**last, "tool_calls": [*last.get("tool_calls", []), *message["tool_calls"]]}
        else:
            joined.append(message)
    return joined


class ResponseRequest(RequestObject, extra="forbid"):
    """A request for a response to items of input, which may continue a previous response."""

    ignored = IGNORED - {"store", "metadata"}
    model: str
    input: Annotated[
        Items[Annotated[Message, PlainValidator(read_item)]],
        BeforeValidator(lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value),
    ] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Any] = Field({"format": {"type": "text"}})
    tools: Items[dict[str, Any]] = Field([])
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] = Field({})
    stream: bool = False
    stream_options: Any = None
    store: bool = True
    metadata: dict[str, Any] = Field({})
    truncation: Annotated[str, allow_only("disabled")] = "disabled"
    include: Annotated[Any, allow_only([])] = Field([])
    background: Annotated[bool, allow_only(False)] = False
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    top_logprobs: None = None

    def to_chat(self, messages: Iterable[Message]) -> dict[str, Any]:
        """Return the fields of the request for a chat of `messages`, after the instructions."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        form, choice = self.text.get("format"), self.tool_choice
        if isinstance(form, dict) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
        return {
            "messages": [*system, *messages],
            "max_tokens": self.max_output_tokens,
            "response_format": form,
            "reasoning_effort": self.reasoning.get("effort"),
            "tools": [{"type": t.get("type"), "function": {k: t[k] for k in t if k != "type"}} for t in self.tools],
            "tool_choice": choice if isinstance(choice, str) else {"function": {"name": choice.get("name")}},
            **self.model_dump(include={"model", "temperature", "top_p", "stream", "parallel_tool_calls"}),
        }

    def echo(self) -> dict[str, Any]:
        """Return the fields that a response repeats."""
        return self.model_dump(exclude={"input", "stream", "stream_options", "include"})

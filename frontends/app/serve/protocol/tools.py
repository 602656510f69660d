"""Tool calls in the chat formats of models: their grammars and parsers.

The chat template of a model determines its format. Calls are JSON in all formats; llguidance grammars can force a call.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.backends.runtime.text.tokenizer import measure_overlap
from weft.ir.errors import WeftError
from weft.ir.storage.documents import parse_json_at


@dataclass(frozen=True)
class ToolChoice:
    """The tools that an answer may or must call.

    mode: none, auto (any number), required (at least one), or named (that tool). parallel: several calls are allowed.
    """

    mode: str = "none"
    named: str | None = None
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")


@dataclass(frozen=True)
class ToolCall:
    """A tool call in an answer; `arguments` is a JSON string."""

    name: str
    arguments: str

    def json(self) -> dict[str, Any]:
        """Return the call as an object of a response, with a new id."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def write_json_rule(schema: dict[str, Any]) -> str:
    """Return the rule, in llguidance's Lark, that matches values of a JSON schema without optional whitespace."""
    # No whitespace around JSON: a model that may write any amount of it can continue forever.
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})}"


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a family of models writes tool calls.

    Each call is between `begin` and `end`, with its arguments under the key `arguments`. If `begin` is empty, an answer
    that starts with `prefix` consists of calls only, separated by `separator` or, with `array`, in one JSON array.
    `special` is a token before the calls that is not part of the text. Templates that contain `marker` use the format.
    """

    name: str
    marker: str
    begin: str = ""
    end: str = ""
    prefix: str = ""
    arguments: str = "arguments"
    array: bool = False
    separator: str = ""
    special: str = ""

    def write_grammar(self, tools: Sequence[dict[str, Any]], choice: ToolChoice, special: int | None) -> str:
        """Return the llguidance grammar of calls that `choice` allows, after the special token `special`, if any."""
        calls = [self._schema(t["function"]) for t in tools if choice.named in (None, t["function"]["name"])]
        schema: dict[str, Any] = {"anyOf": calls} if len(calls) > 1 else calls[0]
        if self.array:
            limit = {} if choice.parallel else {"maxItems": 1}
            schema = {"type": "array", "items": schema, "minItems": 1, **limit}
        call = f"call: {json.dumps(self.begin)} body {json.dumps(self.end)}" if self.begin else "call: body"
        repetition = f" ({json.dumps(self.separator)} call)*" if choice.parallel and not self.array else ""
        first = f"<[{special}]> " if special is not None else ""
        return f"start: {first}call{repetition}\n{call}\nbody: {write_json_rule(schema)}\n"

    def _schema(self, function: dict[str, Any]) -> dict[str, Any]:
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        return {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, self.arguments: parameters},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }

    def parse_calls(self, text: str) -> list[ToolCall] | None:
        """Return the calls in `text` (JSON objects or arrays, without marks); None if `text` is anything else."""
        calls, text = list[ToolCall](), text.strip()
        while text:
            try:
                value, end = parse_json_at(text, 0)
            except (ValueError, WeftError):
                return None
            for call in value if isinstance(value, list) else [value]:
                if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                    return None
                arguments = call.get(self.arguments, {})
                spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                calls.append(ToolCall(call["name"], spelled))
            text = text[end:].lstrip("; \t\r\n")
        return calls or None


FORMATS = (
    ToolFormat("hermes", "<tool_call>", begin="<tool_call>\n", end="\n</tool_call>", separator="\n"),
    ToolFormat("mistral", "[TOOL_CALLS]", prefix="[", array=True, special="[TOOL_CALLS]"),
    ToolFormat("llama", "<|python_tag|>", prefix="{", arguments="parameters", separator="; "),
    ToolFormat("llama", '"parameters"', prefix="{", arguments="parameters", separator="; "),
)


def find_tool_format(template: str) -> ToolFormat | None:
    """Return the tool-call format of a chat template; None without one, or for an unknown format."""
    if "tools" not in template or "<function=" in template:
        return None
    return next((form for form in FORMATS if form.marker in template), None)


class ToolParser:
    """A parser that splits the growing text of an answer into content and calls."""

    def __init__(self, form: ToolFormat) -> None:
        self._form, self._begin, self._end = form, form.begin.strip(), form.end.strip()
        self._pending = ""
        self._has_content = False  # for formats whose calls are the entire answer
        self._in_call = False
        self._has_calls = False

    def push(self, piece: str) -> tuple[str, list[ToolCall]]:
        """Add `piece`, and return the content and the calls that no later piece can change."""
        self._pending += piece
        if not self._begin:
            return self._push_unmarked(), []
        content, calls = "", list[ToolCall]()
        while True:
            text, mark, rest = self._pending.partition(self._end if self._in_call else self._begin)
            if self._in_call and mark:
                parsed = self._form.parse_calls(text)
                content += self._begin + text + mark if parsed is None else ""
                calls += parsed or []
                self._has_calls = self._has_calls or bool(parsed)
            elif not self._in_call:
                # White space before a call belongs to the call, so it waits for the next text.
                ready = text[: len(text) - (0 if mark else measure_overlap(text, self._begin))].rstrip()
                content += ready
                self._pending = self._pending[len(ready) :]
            if not mark:
                return content, calls
            self._pending, self._in_call = rest, not self._in_call

    def _push_unmarked(self) -> str:
        text = self._pending if self._has_content else self._pending.lstrip()
        self._in_call = self._in_call or (not self._has_content and text.startswith(self._form.prefix))
        if self._in_call or not text:
            return ""
        self._has_content, self._pending = True, ""
        return text

    def flush(self) -> tuple[str, list[ToolCall]]:
        """Return the remaining content and calls at the end of the answer."""
        pending, self._pending = self._pending, ""
        if not self._in_call:
            return "" if self._has_calls and not pending.strip() else pending, []
        calls = self._form.parse_calls(pending)  # the end mark may have been cut
        return ("", calls) if calls is not None else (self._begin + pending, [])

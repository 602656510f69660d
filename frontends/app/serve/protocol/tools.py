"""Calls of tools in the chat formats of models: their grammars and parsers.

A format is known by what the model's chat template holds. Calls are JSON in all of them; llguidance grammars force one.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.storage.documents import json_at


@dataclass(frozen=True)
class ToolChoice:
    """The tools that an answer calls: none, any or no (`auto`), at least one (`required`), or the `named` one."""

    mode: str = "none"
    named: str | None = None
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")


@dataclass(frozen=True)
class ToolCall:
    """A call in an answer; `arguments` are JSON text."""

    name: str
    arguments: str

    def json(self) -> dict[str, Any]:
        """Return it as responses hold it, with an id of its own."""
        called = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": called}


def json_rule(schema: dict[str, Any]) -> str:
    """Return the part of a grammar, in llguidance's variant of Lark, that a JSON schema describes."""
    # No whitespace around JSON: a model that may write any amount of it can go on for ever.
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})}"


@dataclass(frozen=True)
class ToolFormat:
    """The form in which a family of models writes calls.

    Each stands between `begin` and `end`, its arguments under the key `arguments`.

    Where `begin` is empty, an answer that opens with `opens` is calls from its first character to its last, separated
    by `separator`, or one array of them. `special` is a token before them that answers do not show.
    """

    name: str
    known_by: str
    begin: str = ""
    end: str = ""
    opens: str = ""
    arguments: str = "arguments"
    array: bool = False
    separator: str = ""
    special: str = ""

    def grammar(self, tools: Sequence[dict[str, Any]], choice: ToolChoice, special: int | None) -> str:
        """Return the grammar, for llguidance, of the calls that `choice` allows; `special` is the id of that token."""
        calls = [self._schema(t["function"]) for t in tools if choice.named in (None, t["function"]["name"])]
        schema: dict[str, Any] = {"anyOf": calls} if len(calls) > 1 else calls[0]
        if self.array:
            more = {} if choice.parallel else {"maxItems": 1}
            schema = {"type": "array", "items": schema, "minItems": 1, **more}
        call = f"call: {json.dumps(self.begin)} body {json.dumps(self.end)}" if self.begin else "call: body"
        again = f" ({json.dumps(self.separator)} call)*" if choice.parallel and not self.array else ""
        first = f"<[{special}]> " if special is not None else ""
        return f"start: {first}call{again}\n{call}\nbody: {json_rule(schema)}\n"

    def _schema(self, function: dict[str, Any]) -> dict[str, Any]:
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        return {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, self.arguments: parameters},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }

    def calls(self, text: str) -> list[ToolCall] | None:
        """Return the calls that `text`, without its marks, spells as objects or arrays of them; None for any other."""
        calls, text = list[ToolCall](), text.strip()
        while text:
            try:
                value, end = json_at(text, 0)
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
    ToolFormat("mistral", "[TOOL_CALLS]", opens="[", array=True, special="[TOOL_CALLS]"),
    ToolFormat("llama", "<|python_tag|>", opens="{", arguments="parameters", separator="; "),
    ToolFormat("llama", '"parameters"', opens="{", arguments="parameters", separator="; "),
)


def format_of(template: str) -> ToolFormat | None:
    """Return the format in which a model with this chat template calls tools; None where it calls none, or in another
    format."""
    if "tools" not in template or "<function=" in template:
        return None
    return next((form for form in FORMATS if form.known_by in template), None)


class ToolParser:
    """Splits the growing text of an answer into content and calls."""

    def __init__(self, form: ToolFormat) -> None:
        self._form, self._begin, self._end = form, form.begin.strip(), form.end.strip()
        self._held = ""
        self._begun = False  # content has, where an answer is calls as a whole
        self._inside = False  # of a call
        self._called = False

    def push(self, piece: str) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls that are certain after `piece`."""
        self._held += piece
        if not self._begin:
            return self._push_whole(), []
        content, calls = "", list[ToolCall]()
        while True:
            text, mark, rest = self._held.partition(self._end if self._inside else self._begin)
            if self._inside and mark:
                called = self._form.calls(text)
                content += self._begin + text + mark if called is None else ""
                calls += called or []
                self._called = self._called or bool(called)
            elif not self._inside:
                # White space before a call belongs to it, so it waits for what follows.
                ready = text[: len(text) - (0 if mark else _overlap(text, self._begin))].rstrip()
                content += ready
                self._held = self._held[len(ready) :]
            if not mark:
                return content, calls
            self._held, self._inside = rest, not self._inside

    def _push_whole(self) -> str:
        text = self._held if self._begun else self._held.lstrip()
        self._inside = self._inside or (not self._begun and text.startswith(self._form.opens))
        if self._inside or not text:
            return ""
        self._begun, self._held = True, ""
        return text

    def flush(self) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls that the end of the answer makes certain."""
        held, self._held = self._held, ""
        if not self._inside:
            return "" if self._called and not held.strip() else held, []
        calls = self._form.calls(held)  # the end mark may have been cut
        return ("", calls) if calls is not None else (self._begin + held, [])


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` with which `mark` begins."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)

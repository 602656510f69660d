"""Tools: how requests describe them, and how the chat formats of models write calls.

A format is known by what the model's chat template holds. Calls are JSON in all of them; llguidance grammars force one.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.storage.documents import json_at, parse_json

from .errors import invalid
from .fields import Fields
from .generation import json_rule

MOST_TOOLS = 128


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


def read_tools(fields: Fields) -> tuple[list[dict[str, Any]], ToolChoice]:
    """Read the tools of a request and which of them to call. Raises ApiError on wrong ones."""
    tools = fields.get("tools", list, [])
    if len(tools) > MOST_TOOLS:
        raise invalid(f"Invalid 'tools': at most {MOST_TOOLS} tools, but {len(tools)} given.", "tools")
    for i, tool in enumerate(tools):
        name = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise invalid(f"Invalid type for '{name}': expected an object.", name, "invalid_type")
        outer = Fields(tool, name)
        outer.need("type", str)
        outer.one_of("type", ("function",))
        function = Fields(outer.need("function", dict), f"{name}.function")
        function.need("name", str)
        function.get("parameters", dict)
    parallel = fields.get("parallel_tool_calls", bool, True)
    names = [tool["function"]["name"] for tool in tools]
    return tools, _choice(fields, names, parallel)


def _choice(fields: Fields, names: Sequence[str], parallel: bool) -> ToolChoice:
    if not fields.given("tool_choice"):
        return ToolChoice("auto" if names else "none", None, parallel)
    choice = fields.raw("tool_choice")
    if not names:
        if choice in ("none", "auto"):
            return ToolChoice()
        raise invalid("'tool_choice' is only allowed when 'tools' are specified.", "tool_choice")
    if isinstance(choice, str):
        mode = fields.one_of("tool_choice", ("none", "auto", "required")) or "auto"
        return ToolChoice(mode, None, parallel)
    named = Fields(fields.get("tool_choice", dict), "tool_choice")
    named.one_of("type", ("function",))
    name = Fields(named.need("function", dict), "tool_choice.function").need("name", str)
    if name not in names:
        raise invalid(f"Tool choice {name!r:.80} is not among the 'tools'.", "tool_choice")
    return ToolChoice("named", name, False)


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
        """Return the calls that `text`, without its marks, spells; None where it spells none."""
        try:
            read = parse_json(text.strip(), "a call", kind=list if self.array else dict)
        except WeftError:
            return None
        found = []
        for call in read if self.array else [read]:
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                return None
            arguments = call.get(self.arguments, {})
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            found.append(ToolCall(call["name"], arguments))
        return found


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
        self._form = form
        self._held = ""
        self._begun = False  # content has, where an answer is calls as a whole
        self._inside = False  # of a call
        self._called = False
        self._whole = False  # all of the answer is calls

    def push(self, piece: str) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls that are certain after `piece`."""
        self._held += piece
        if not self._form.begin:
            return self._push_whole(), []
        content, calls = "", list[ToolCall]()
        begin, end = self._form.begin.strip(), self._form.end.strip()
        while True:
            if not self._inside:
                at = self._held.find(begin)
                certain = self._held[: len(self._held) - _overlap(self._held, begin) if at < 0 else at]
                # White space before a call belongs to it, so it waits for what follows.
                ready = certain.rstrip()
                content += ready
                if at < 0:
                    self._held = self._held[len(ready) :]
                    return content, calls
                self._held, self._inside = self._held[at + len(begin) :], True
            at = self._held.find(end)
            if at < 0:
                return content, calls
            text, self._held, self._inside = self._held[:at], self._held[at + len(end) :], False
            found = self._form.calls(text)
            if found is None:
                content += begin + text + end
            else:
                calls += found
                self._called = True

    def _push_whole(self) -> str:
        if self._whole:
            return ""
        text = self._held if self._begun else self._held.lstrip()
        if not text:
            return ""
        if not self._begun and text.startswith(self._form.opens):
            self._whole = True
            return ""
        self._begun, self._held = True, ""
        return text

    def flush(self) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls that the end of the answer makes certain."""
        held, self._held = self._held, ""
        if self._inside:
            found = self._form.calls(held)  # its end may have been cut
            return ("", found) if found is not None else (self._form.begin.strip() + held, [])
        if not self._whole:
            return "" if self._called and not held.strip() else held, []
        split: Callable[[str], Iterator[str]] = iter_objects if not self._form.array else lambda text: iter([text])
        calls: list[ToolCall] = []
        for text in split(held):
            found = self._form.calls(text)
            if found is None:
                return held, []
            calls += found
        return "", calls


def iter_objects(text: str) -> Iterator[str]:
    """Yield the JSON objects of a text in which they stand one after the other, separated by ; or white space."""
    at = 0
    while at < len(text):
        if text[at] in "; \t\r\n":
            at += 1
            continue
        try:
            _, end = json_at(text, at)
        except (ValueError, WeftError):
            end = len(text)
        yield text[at:end]
        at = end


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` with which `mark` begins."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)

"""Tools: calls in the formats of models, as answers of the server and by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from weft.frontends.app.serve.protocol.tools import FORMATS, ToolCall, ToolChoice, ToolParser, find_tool_format

from ..serving import NAME, compiled, served
from ..serving import client as official

PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "square", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "square", "arguments": {"x": 7}}\n</tool_call>'


def ask(client: openai.OpenAI, say: str | None = None, **options: Any) -> Any:
    body = None if say is None else {"structured_outputs": {"choice": [say]}}
    messages: Any = [{"role": "user", "content": "square 7"}]
    given: dict[str, Any] = {"model": NAME, "messages": messages, "tools": TOOLS, "extra_body": body, "max_tokens": 160}
    return client.chat.completions.create(**{**given, **options})


def test_calls_are_parsed_from_an_answer(client: openai.OpenAI) -> None:
    """`say` constrains the answer to a text, since this model would not call."""
    (choice,) = ask(client, f"Let me see.\n{CALL}\n{CALL.replace('7', '8')}").choices
    first, second = choice.message.tool_calls
    assert choice.message.content == "Let me see." and choice.finish_reason == "tool_calls"
    assert (first.type, first.function.name, json.loads(first.function.arguments)) == ("function", "square", {"x": 7})
    assert json.loads(second.function.arguments) == {"x": 8} and first.id != second.id
    (choice,) = ask(client, CALL).choices
    assert choice.message.content is None and len(choice.message.tool_calls) == 1


def test_calls_are_streamed(client: openai.OpenAI) -> None:
    with ask(client, f"Let me see. {CALL}\n{CALL.replace('7', '8')}", stream=True) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see."
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [(call.index, json.loads(call.function.arguments)["x"]) for call in calls] == [(0, 7), (1, 8)]
    assert all(call.id and call.function.name == "square" for call in calls)
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_is_one_of_the_tools(client: openai.OpenAI, seed: int) -> None:
    options: dict[str, Any] = {"tool_choice": "required", "seed": seed, "parallel_tool_calls": False}
    (choice,) = ask(client, **options).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    arguments = json.loads(call.function.arguments)
    assert arguments == {} if call.function.name == "now" else isinstance(arguments["x"], int)


def test_a_named_call_is_that_tool(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "square"}}
    (answer,) = ask(client, tool_choice=choice, seed=2).choices
    (call,) = answer.message.tool_calls
    assert call.function.name == "square" and list(json.loads(call.function.arguments)) == ["x"]
    assert answer.finish_reason == "stop"  # as OpenAI says of a named function


def test_offered_tools_need_not_be_called(client: openai.OpenAI) -> None:
    (choice,) = ask(client, "no call", tool_choice="none").choices
    assert choice.message.content == "no call" and choice.message.tool_calls is None
    (choice,) = ask(client, "no call").choices
    assert choice.message.content == "no call" and choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "cube"}}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "search", "function": {}}]}, "tools[0].type"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_wrong_tools_are_refused(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **options)
    assert refused.value.param == param


def test_a_template_without_tools_refuses_them(tmp_path: Path) -> None:
    folder = compiled(tmp_path / "plain", "{% for m in messages %}{{ m.content }}{% endfor %}")
    with served(folder) as server, official(server) as client:
        with pytest.raises(openai.BadRequestError, match="takes no tools"):
            ask(client)
        assert ask(client, tools=[]).choices[0].finish_reason in ("stop", "length")


HERMES, MISTRAL, LLAMA = FORMATS[:3]


def test_formats_are_known_by_their_templates() -> None:
    assert find_tool_format("{{ tools }} <tool_call>") is HERMES
    assert find_tool_format("{{ tools }} [TOOL_CALLS]") is MISTRAL
    assert find_tool_format('{{ tools }} {"name": f, "parameters": d}') is not None
    assert find_tool_format("<tool_call>") is None and find_tool_format("{{ tools }}") is None
    assert find_tool_format("{{ tools }}<tool_call><function=name>") is None  # calls in XML


BOTH = [("square", {"x": 7}), ("now", {})]
ANSWERS = [
    (HERMES, f"see\n\n{CALL}\n", "see", [("square", {"x": 7})]),
    (HERMES, f"{CALL}\n{CALL}", "", [("square", {"x": 7})] * 2),
    (HERMES, CALL.removesuffix("\n</tool_call>"), "", [("square", {"x": 7})]),
    (HERMES, "a < b <tool", "a < b <tool", []),
    (HERMES, "<tool_call>nonsense</tool_call> on", "<tool_call>nonsense</tool_call> on", []),
    (HERMES, "  plain \n", "  plain \n", []),
    (
        MISTRAL,
        '[{"name": "square", "arguments": {"x": 7}}, {"name": "now", "arguments": {}}]',
        "",
        BOTH,
    ),
    (MISTRAL, "[1] is a source", "[1] is a source", []),
    (
        LLAMA,
        '{"name": "square", "parameters": {"x": 7}}; {"name": "now", "parameters": {}}',
        "",
        BOTH,
    ),
    (LLAMA, "plain {text}", "plain {text}", []),
    (LLAMA, "{not json}", "{not json}", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_parsed_from_pieces_of_any_size(
    form: Any, text: str, content: str, calls: list[tuple[str, Any]], size: int
) -> None:
    parser, said, found = ToolParser(form), "", list[ToolCall]()
    for at in range(0, len(text), size):
        piece, more = parser.push(text[at : at + size])
        said, found = said + piece, found + more
    piece, more = parser.flush()
    assert said + piece == content
    assert [(call.name, json.loads(call.arguments)) for call in found + more] == calls


def test_grammar_of_each_format_accepts_its_own_calls(folder: Path) -> None:
    from weft.frontends.app.serve.engine.constraints import Constraints

    constraints = Constraints(folder, 258, [257])
    texts = {
        "hermes": '<tool_call>\n{"name":"square","arguments":{"x":7}}\n</tool_call>',
        "mistral": '[{"name":"square","arguments":{"x":7}}]',
        "llama": '{"name":"square","parameters":{"x":7}}',
    }
    for form in FORMATS:
        guide = constraints.build_guide(form.write_grammar(TOOLS, ToolChoice("required", None, False), None))
        for token in constraints.tokenizer.tokenize_str(texts[form.name]):
            guide.accept_token(token)
        assert guide.is_complete

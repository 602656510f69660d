"""The Responses API by the official client: objects, streams, earlier responses, tools and constraints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from weft.backends.runtime.core.generation import Generator
from weft.frontends.app.serve import response_reply
from weft.frontends.app.serve.response_reply import ResponseStore

from .serving import NAME, http, refusal, served
from .serving import client as official
from .serving import url as url_of

PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "name": "square", "parameters": PARAMETERS, "strict": True}]
FORM = {"type": "json_schema", "name": "number", "schema": PARAMETERS, "strict": True}
CHOICE = {"type": "function", "name": "square"}


def respond(client: openai.OpenAI, items: Any = "hi", **options: Any) -> Any:
    given: dict[str, Any] = {"model": NAME, "input": items, "temperature": 0, "max_output_tokens": 16}
    return client.responses.create(**{**given, **options})


def alone(model: Generator, *messages: tuple[str, str]) -> str:
    chat = [{"role": role, "content": content} for role, content in messages]
    return model.generate([model.chat_prompt(chat)], max_tokens=16)[0].text


def test_response_is_the_answer_of_a_chat(client: openai.OpenAI, model: Generator) -> None:
    found = respond(client, instructions="Be brief.", metadata={"a": "b"})
    assert found.output_text == alone(model, ("system", "Be brief."), ("user", "hi"))
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert (found.object, found.model, found.instructions, found.metadata) == (
        "response",
        NAME,
        "Be brief.",
        {"a": "b"},
    )
    assert found.usage.output_tokens == 16 and found.usage.total_tokens == 16 + found.usage.input_tokens
    (message,) = found.output
    assert (message.type, message.role, message.content[0].type) == ("message", "assistant", "output_text")
    chat = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        max_tokens=9,
    )
    assert chat.usage is not None and found.usage.input_tokens == chat.usage.prompt_tokens
    sampled = [respond(client, temperature=1.5, top_p=0.9, max_output_tokens=40) for _ in range(2)]
    assert sampled[0].output_text != sampled[1].output_text and sampled[0].top_p == 0.9


def test_items_are_messages(client: openai.OpenAI, model: Generator) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "ho", "annotations": []}]},
        {"role": "user", "content": "and?"},
    ]
    expected = alone(model, ("system", "Be brief."), ("user", "hi"), ("assistant", "ho"), ("user", "and?"))
    assert respond(client, items).output_text == expected


@pytest.mark.parametrize("stream", [False, True])
def test_response_continues_the_previous_one(client: openai.OpenAI, model: Generator, stream: bool) -> None:
    first = respond(client, "hi", instructions="Be brief.", stream=stream)
    if stream:
        first = list(first)[-1].response
    second = respond(client, "and?", previous_response_id=first.id)
    expected = alone(model, ("user", "hi"), ("assistant", first.output_text), ("user", "and?"))
    assert second.output_text == expected  # without the instructions of the first
    assert second.previous_response_id == first.id and second.id != first.id
    third = respond(client, "so?", previous_response_id=second.id, store=False)
    chat = [("user", "hi"), ("assistant", first.output_text), ("user", "and?"), ("assistant", second.output_text)]
    assert third.output_text == alone(model, *chat, ("user", "so?"))
    with pytest.raises(openai.BadRequestError, match=f"Previous response with id '{third.id}' not found"):
        respond(client, previous_response_id=third.id)


def test_events_describe_the_output(client: openai.OpenAI) -> None:
    whole = respond(client)
    events = list(respond(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    n = kinds.count("output_text.delta")
    opening = ["created", "in_progress", "output_item.added", "content_part.added"]
    closing = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds == [*opening, *["output_text.delta"] * n, *closing] and n > 0
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    done = next(event for event in events if event.type == "response.output_text.done")
    assert text == done.text == whole.output_text == events[-1].response.output_text
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert {e.item_id for e in events if hasattr(e, "item_id")} == {events[-1].response.output[0].id}
    form: Any = {"format": FORM}  # a complete answer, which the client's helper waits for
    with client.responses.stream(model=NAME, input="hi", temperature=0, text=form) as stream:
        assert json.loads(stream.get_final_response().output_text).keys() == {"x"}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_answered(client: openai.OpenAI, model: Generator, stream: bool) -> None:
    found = respond(client, "square", tools=TOOLS, tool_choice=CHOICE, stream=stream, max_output_tokens=200)
    if stream:
        events = list(found)
        found = events[-1].response
        (done,) = (event for event in events if event.type == "response.function_call_arguments.done")
        assert done.arguments == found.output[0].arguments and done.item_id == found.output[0].id
    (call,) = found.output
    assert (call.type, call.name, found.status) == ("function_call", "square", "completed")
    number = json.loads(call.arguments)["x"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "49"}
    after = respond(client, [result], previous_response_id=found.id)
    rendered = f'<s>user\nsquare</s>\n<s>assistant\n<tool_call>{{"name": "square", "arguments": {{"x": {number}}}}}'
    rendered += "</tool_call></s>\n<s>tool\n49</s>\n<s>assistant"
    assert after.output_text == model.generate(model.tokenizer.encode(rendered), max_tokens=16)[0].text
    items = ["square", call.model_dump(exclude_none=True), result]
    given = respond(client, [{"role": "user", "content": items[0]}, *items[1:]])
    assert given.output_text == after.output_text


def test_text_follows_a_schema(client: openai.OpenAI) -> None:
    found = respond(client, text={"format": FORM}, max_output_tokens=60)
    assert 0 <= json.loads(found.output_text)["x"] <= 9 and found.status == "completed"
    assert found.text.format.name == "number"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "the array is empty"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "text only"),
        ({"input": [{"type": "reasoning"}]}, "input[0]", "expected a message, function_call"),
        ({"input": "x" * 3000}, "input", "reduce the length of the input"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "Supported values are: 'function'"),
        ({"text": {"format": {**FORM, "schema": {"type": "no"}}}}, "text.format.schema", "type"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "Supported values"),
        ({"background": True}, "background", "not supported"),
        ({"nonsense": 1}, "nonsense", "Unrecognized request argument"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not found"),
    ],
)
def test_wrong_fields_are_named(server: Any, fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal(server, "responses", {"model": NAME, "input": "hi", **fields})
    assert error["param"] == param and words in error["message"] and "messages" not in error["message"]


def test_oldest_responses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_reply, "STORE_BYTES", 250)
    store = ResponseStore()
    for number in range(4):
        store.add(f"resp_{number}", [{"role": "user", "content": "x" * 50}])
    assert [store.get(f"resp_{number}") is not None for number in range(4)] == [False, False, True, True]


def test_events_have_names(server: Any) -> None:
    with http(server) as plain:
        body = {"model": NAME, "input": "hi", "max_output_tokens": 2, "stream": True}
        text = plain.post(f"{url_of(server)}/responses", json=body).text
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    assert all(name == f"event: {json.loads(data.removeprefix('data: '))['type']}" for name, data in blocks)


def test_failure_ends_a_stream_with_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(folder) as server, official(server) as client:
        monkeypatch.setattr(cast(Any, server.service.worker)._batches[""], "advance", lambda: 1 / 0)
        with pytest.raises(openai.APIError, match="had an error"):
            list(respond(client, stream=True))

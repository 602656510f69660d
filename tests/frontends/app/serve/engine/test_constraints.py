"""Constrained answers: whatever the model would say, they belong to the language that the request names."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from ..serving import NAME

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8, "pattern": "^[a-z]*$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def ask(client: openai.OpenAI, structured: dict[str, Any] | None = None, **options: Any) -> Any:
    body = None if structured is None else {"structured_outputs": structured}
    messages: Any = [{"role": "user", "content": "go"}]
    given: dict[str, Any] = {"model": NAME, "messages": messages, "extra_body": body, "max_tokens": 150, **options}
    return client.chat.completions.create(**given)


@pytest.mark.parametrize("seed", range(8))
def test_answers_follow_a_json_schema(client: openai.OpenAI, seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    (choice,) = ask(client, response_format=form, seed=seed, temperature=1.5).choices
    person = json.loads(choice.message.content)
    assert choice.finish_reason == "stop" and set(person) == {"name", "age", "tags"}
    assert re.fullmatch("[a-z]{0,8}", person["name"]) and 0 <= person["age"] <= 150
    assert set(person["tags"]) <= {"red", "blue"} and len(person["tags"]) <= 2


def test_many_choices_follow_a_schema_each(client: openai.OpenAI) -> None:
    found = ask(client, {"json": SCHEMA}, n=6, temperature=2.0, seed=1)
    people = [json.loads(choice.message.content) for choice in found.choices]
    assert len({person["name"] for person in people}) > 1


def test_json_objects(client: openai.OpenAI) -> None:
    """Those that end within the limit parse; the others are cut, and say so."""
    found = ask(client, response_format={"type": "json_object"}, n=8, temperature=2.0, seed=3)
    ended = [c.message.content for c in found.choices if c.finish_reason == "stop"]
    assert all(isinstance(json.loads(text), dict) for text in ended)
    assert {c.finish_reason for c in found.choices} <= {"stop", "length"}
    assert all(c.message.content.startswith("{") for c in found.choices)


def test_regular_expressions_choices_and_grammars(client: openai.OpenAI) -> None:
    for seed in range(4):
        text = ask(client, {"regex": r"\d{3}-[A-F]{2}"}, seed=seed).choices[0].message.content
        assert re.fullmatch(r"\d{3}-[A-F]{2}", text)
        choice = ask(client, {"choice": ["yes", "no", 'may "be"']}, seed=seed).choices[0]
        assert choice.message.content in ("yes", "no", 'may "be"') and choice.finish_reason == "stop"
        grammar = 'start: sum\nsum: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[1-9]/'
        assert re.fullmatch(
            r"[1-9](\+[1-9]){1,3}", ask(client, {"grammar": grammar}, seed=seed).choices[0].message.content
        )


def test_constrained_stream_joins_to_the_full_answer(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"structured": {"json": SCHEMA}, "seed": 5}
    with ask(client, stream=True, **options) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == ask(client, **options).choices[0].message.content and json.loads(text)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"structured": {"regex": "a(b"}}, "structured_outputs.regex"),
        ({"structured": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"structured": {"json": {"type": "thing"}}}, "structured_outputs.json"),
        ({"structured": {"choice": []}}, "structured_outputs.choice"),
        ({"structured": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 3}}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_wrong_constraints_are_refused(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **options)
    assert refused.value.param == param and refused.value.type == "invalid_request_error"

"""Chats by the official client: whole and streamed answers, as the model gives them alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import pre_tokenizers

from weft.backends.runtime.core.generation import Generator
from weft.frontends.app.serve.server import Server

from .serving import CONTEXT, NAME, compiled, held, served
from .serving import client as official

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Héllo, 世界!"}]


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": NAME, "messages": MESSAGES, "max_tokens": 24, **options})


def byte_of(token: int) -> bytes:
    """The byte of a token of the byte-level alphabet: printable bytes are themselves, the others lie above 255."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    table = {chr(byte if byte in plain else next(rest)): byte for byte in range(256)}
    return bytes([table[alphabet[token]]])


def alone(model: Generator, **options: Any) -> Any:
    return model.generate(model.chat_prompt(MESSAGES), **{"max_tokens": 24, **options})[0]


def joined(chunks: Any, choice: int = 0) -> str:
    return "".join(part.delta.content or "" for chunk in chunks for part in chunk.choices if part.index == choice)


def test_a_greedy_answer_is_that_of_the_model(client: openai.OpenAI, model: Generator) -> None:
    answer, expected = ask(client, temperature=0), alone(model)
    (choice,) = answer.choices
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert choice.finish_reason == "length" and choice.index == 0 and choice.logprobs is None
    assert (answer.object, answer.model) == ("chat.completion", NAME) and answer.id.startswith("chatcmpl-")
    assert answer.usage.prompt_tokens == len(expected.prompt)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == 24 + len(expected.prompt)
    assert answer.system_fingerprint.startswith("fp_")


def test_stream_joins_to_the_full_answer(client: openai.OpenAI, model: Generator) -> None:
    with ask(client, temperature=0, stream=True) as stream:
        chunks = list(stream)
    assert joined(chunks) == alone(model).text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1 and {c.object for c in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_ends_with_usage_on_request(client: openai.OpenAI) -> None:
    with ask(client, temperature=0, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = list(stream)
    assert last.choices == [] and last.usage.completion_tokens == 24
    assert last.usage == ask(client, temperature=0).usage
    assert all(chunk.usage is None for chunk in chunks)


def test_chunks_hold_whole_characters(client: openai.OpenAI, server: Server) -> None:
    """A token a byte: each character of several bytes comes whole, also where the model stands still within one."""
    text = "naïve 👩‍👧 世界 🎉"
    options = {"stream": True, "extra_body": {"structured_outputs": {"choice": [text]}}}
    with held(server) as hold, ask(client, max_tokens=99, **options) as stream:
        contents = (chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content)
        for _ in range(len("naïve 👩".encode()) - 2):
            hold.step()
        pieces = [next(contents)]
        hold.go()
        pieces += contents
    assert "".join(pieces) == text and len(pieces) > 1
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_answers_and_never_show(client: openai.OpenAI, model: Generator, stream: bool) -> None:
    text = alone(model).text
    stop = text[5:8]
    cut = text[: text.index(stop)]
    if stream:
        with ask(client, temperature=0, stop=stop, stream=True) as chunks:
            found = list(chunks)
        content, reason = joined(found), found[-1].choices[0].finish_reason
    else:
        (choice,) = ask(client, temperature=0, stop=["never there", stop]).choices
        content, reason = choice.message.content, choice.finish_reason
    assert content == cut and reason == "stop"


def test_the_stop_token_ends_an_answer_and_is_not_shown(client: openai.OpenAI) -> None:
    answer = ask(client, logit_bias={"257": 100}, logprobs=True)
    (choice,) = answer.choices
    assert choice.message.content == "" and choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == 1 and choice.logprobs.content == []


def test_seeds_repeat_answers_and_choices_differ(client: openai.OpenAI, model: Generator) -> None:
    options: dict[str, Any] = {"seed": 11, "n": 3, "temperature": 1.5}
    first, second = ask(client, **options), ask(client, **options)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices] and len(set(texts)) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    expected = model.generate([model.chat_prompt(MESSAGES)] * 3, max_tokens=24, temperature=1.5, seed=11)
    assert texts == [result.text for result in expected]
    assert first.usage.completion_tokens == 72 and first.usage.prompt_tokens == len(expected[0].prompt)
    with ask(client, stream=True, **options) as stream:
        chunks = list(stream)
    assert [joined(chunks, i) for i in range(3)] == texts
    assert ask(client, seed=-5).choices[0].message.content == ask(client, seed=-5).choices[0].message.content


def test_penalties_and_biases_change_answers_as_they_should(client: openai.OpenAI, model: Generator) -> None:
    options: dict[str, Any] = {"frequency_penalty": 2.0, "presence_penalty": 1.0, "logit_bias": {"65": 100}}
    found = ask(client, temperature=0, **options).choices[0].message.content
    assert found == alone(model, **{**options, "logit_bias": {65: 100.0}}).text
    assert found != alone(model).text


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_come_with_their_tokens(client: openai.OpenAI, model: Generator, stream: bool) -> None:
    odd = [256, 257, sorted(pre_tokenizers.ByteLevel.alphabet()).index("ÿ")]  # specials, and a byte of no text at all
    bias = {str(token): -100 for token in odd}
    options: dict[str, Any] = {"temperature": 0, "logprobs": True, "top_logprobs": 2, "logit_bias": bias}
    if stream:
        with ask(client, stream=True, **options) as chunks:
            parts = [c.choices[0].logprobs for c in chunks]
        content = [entry for part in parts if part is not None for entry in part.content]
    else:
        content = ask(client, **options).choices[0].logprobs.content
    expected = alone(model, logit_bias=dict.fromkeys(odd, -100.0))
    raw = [bytes(entry.bytes) for entry in content]
    assert raw == [byte_of(token) for token in expected.tokens]
    assert [entry.token for entry in content if entry.token.isascii() and len(entry.token) == 1] == [
        byte.decode() for byte in raw if byte.isascii()
    ]
    assert "\\xe9" in [entry.token for entry in content] or not any(byte == b"\xe9" for byte in raw)
    for entry in content:
        assert entry.logprob <= 0 and math.exp(entry.logprob) <= 1
        assert entry.top_logprobs[0].logprob >= entry.logprob
        assert entry.top_logprobs[1].logprob <= entry.logprob


def test_messages_may_be_parts_of_text_and_calls(client: openai.OpenAI, model: Generator) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    rendered = "<s>system\nBe brief.</s>\n<s>user\na\nb</s>\n<s>assistant\n"
    rendered += '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call></s>\n<s>tool\n2</s>\n<s>assistant'
    found = ask(client, messages=messages, temperature=0)
    expected = model.generate(model.tokenizer.encode(rendered), max_tokens=24)[0]
    assert found.choices[0].message.content == expected.text
    assert found.usage.prompt_tokens == len(expected.prompt)


def test_an_answer_ends_where_the_context_does(client: openai.OpenAI, model: Generator) -> None:
    answer = ask(client, max_tokens=None, temperature=0, logit_bias={"257": -100})
    prompt = len(model.chat_prompt(MESSAGES))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == CONTEXT + 1 - prompt
    assert ask(client, max_completion_tokens=3).usage.completion_tokens == 3


def test_missing_sampling_options_are_the_defaults_of_the_model(model: Generator, tmp_path: Path) -> None:
    """The defaults of sampling in weft.json, as vLLM uses those of generation_config.json."""
    folder = compiled(tmp_path / "tiny")
    facts = json.loads((folder / "weft.json").read_text())
    said = {"temperature": 0.0, "repetition_penalty": 1.4, "max_tokens": 9}
    (folder / "weft.json").write_text(json.dumps({**facts, "sampling": said}))
    with served(folder) as server, official(server) as client:
        usual = client.chat.completions.create(model=NAME, messages=MESSAGES)
        own = ask(client, extra_body={"repetition_penalty": 1.0})
        (continued,) = client.completions.create(model=NAME, prompt="the sky").choices
    assert usual.choices[0].message.content == alone(model, max_tokens=9, repetition_penalty=1.4).text
    assert own.choices[0].message.content == alone(model).text
    assert continued.text == model.generate("the sky", max_tokens=16, repetition_penalty=1.4)[0].text

"""Completions, embeddings and lists by the official client."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import weft
from weft import MLP, Attention, Block, Encoder, LayerNorm
from weft.backends.runtime.core.generation import Generator
from weft.frontends import load_source
from weft.frontends.app.serve.server_settings import ServerSettings
from weft.frontends.app.serve.service import Service
from weft.ir.errors import WeftError

from ...formats.hf import peft_models as peft
from .serving import CONTEXT, NAME, http, served
from .serving import client as official


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    return client.completions.create(**{"model": NAME, "prompt": prompt, "temperature": 0, **options})


def test_a_prompt_is_continued_as_by_the_model(client: openai.OpenAI, model: Generator) -> None:
    answer = complete(client, "once upon")
    (expected,) = model.generate("once upon", max_tokens=16)
    assert answer.choices[0].text == expected.text and answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.usage.completion_tokens, answer.usage.prompt_tokens) == ("text_completion", 16, 9)
    with complete(client, "once upon", stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_prompts_are_texts_or_tokens_one_or_several(client: openai.OpenAI, model: Generator) -> None:
    texts = ["once", "upon a", "time"]
    ids = [model.tokenizer.encode(text) for text in texts]
    expected = [result.text for result in model.generate(texts, max_tokens=8)]
    for prompts in (texts, ids):
        answer = complete(client, prompts, max_tokens=8)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.prompt_tokens == sum(map(len, ids)) and answer.usage.completion_tokens == 24
    assert complete(client, ids[0], max_tokens=8).choices[0].text == expected[0]
    answer = complete(client, texts[:2], max_tokens=8, n=2)
    assert [choice.text for choice in answer.choices] == [expected[i] for i in (0, 0, 1, 1)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_echoed(client: openai.OpenAI, model: Generator, stream: bool) -> None:
    expected = "once" + model.generate("once", max_tokens=4)[0].text
    answer = complete(client, "once", max_tokens=4, echo=True, stream=stream)
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_have_their_places_in_the_text(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {
        "max_tokens": 12,
        "logprobs": 3,
        "extra_body": {"structured_outputs": {"regex": "[a-z]{12}"}},
    }
    found = complete(client, "once", stream=stream, **options)
    chunks = list(found) if stream else [found]
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert [token for part in parts for token in part.tokens] == list(text) and len(text) == 12
    assert [at for part in parts for at in part.text_offset] == list(range(12))
    assert all(len(top) == 3 for part in parts for top in part.top_logprobs)
    assert all(logprob <= 0 for part in parts for logprob in part.token_logprobs)


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    assert (listed.id, listed.object, listed.owned_by) == (NAME, "model", "weft")
    assert client.models.retrieve(NAME).max_model_len == CONTEXT  # type: ignore[attr-defined]  # an extra field
    with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
        client.models.retrieve("other")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled encoder whose tokens are words."""
    folder = tmp_path_factory.mktemp("encoder") / "out"
    block = Block(Attention(heads=4, causal=False), MLP(48), LayerNorm())
    weft.compile(load_source(Encoder(vocab=12, dim=32, layers=2, block=block, context=16)), folder)
    words = ["a", "cat", "sat", "on", "the", "mat", "dog", "ran", "to", "it", "and", "."]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_embeddings_are_those_of_the_model(encoder: Path) -> None:
    texts = ["the cat sat", "a dog ran to the mat", "it"]
    expected = np.asarray(weft.load(encoder).encode(texts))
    with served(encoder) as server, official(server) as client:
        found = client.embeddings.create(model=NAME, input=texts)  # as base64, which the client asks for by itself
        assert np.allclose([item.embedding for item in found.data], expected, atol=1e-6)
        assert [item.index for item in found.data] == [0, 1, 2] and found.usage.prompt_tokens == 10
        lists = client.embeddings.create(model=NAME, input=[[4, 1, 2], [9]], encoding_format="float", dimensions=32)
        assert np.allclose([item.embedding for item in lists.data], expected[[0, 2]], atol=1e-6)
        (short,) = client.embeddings.create(model=NAME, input=[[9]], encoding_format="float", dimensions=7).data
        assert np.allclose(short.embedding, expected[2, :7], atol=1e-6)
        with http(server) as plain:
            body = {"model": NAME, "input": "it", "encoding_format": "base64"}
            data = plain.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
        assert np.allclose(np.frombuffer(base64.b64decode(data), "<f4"), expected[2], atol=1e-6)


def test_encoder_refuses_long_inputs_and_completions(encoder: Path) -> None:
    with served(encoder) as server, official(server) as client:
        for prompt, match in (("cat " * 17, "maximum context length is 16 tokens"), ([99], "from 0 to 11")):
            with pytest.raises(openai.BadRequestError, match=match):
                client.embeddings.create(model=NAME, input=prompt)
        with pytest.raises(openai.BadRequestError, match="have only 32 dimensions"):
            client.embeddings.create(model=NAME, input="it", dimensions=33)
        with pytest.raises(openai.BadRequestError, match="use /v1/embeddings"):
            client.completions.create(model=NAME, prompt="it")


def test_a_decoder_has_no_embeddings(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="has no embeddings"):
        client.embeddings.create(model=NAME, input="it")


def test_requests_name_an_adapter(tmp_path: Path) -> None:
    """Adapters answer together, each as its merged model, and share no stored prefixes."""
    base = peft.save_base(tmp_path / "base")
    peft.write_tokenizer(base)
    layers = {"first": ["q_proj", "down_proj"], "second": ["o_proj"]}
    for seed, (name, modules) in enumerate(layers.items()):
        peft.adapt(base, tmp_path / name, seed=seed, target_modules=modules)
    weft.compile(base, tmp_path / "out", switch_adapters=[tmp_path / name for name in layers], max_length=160)
    (tmp_path / "out" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    prompt, expected = " ".join(f"w{3 + i * 7 % 50}" for i in range(100)), {}
    for name in (NAME, *layers):
        weft.compile(base, tmp_path / f"{name}-merged", adapters=[tmp_path / name] * (name in layers), max_length=160)
        expected[name] = weft.load(tmp_path / f"{name}-merged").generate(prompt, max_tokens=12)[0].text
    assert len(set(expected.values())) == 3
    with served(tmp_path / "out") as server, official(server) as client:
        listed = {model.id: model.model_dump()["parent"] for model in client.models.list()}
        assert listed == {NAME: None, "first": NAME, "second": NAME}
        assert client.models.retrieve("first").id == "first"
        for cached in (0, 64):
            with ThreadPoolExecutor(3) as pool:
                answers = list(pool.map(lambda name: complete(client, prompt, model=name, max_tokens=12), expected))
            assert {answer.model: answer.choices[0].text for answer in answers} == expected
            assert {answer.usage.prompt_tokens_details.cached_tokens for answer in answers} == {cached}
        found = client.responses.create(model="second", input=prompt, temperature=0, max_output_tokens=12)
        assert (found.model, found.output_text) == ("second", expected["second"])
        with pytest.raises(openai.NotFoundError, match="`third` does not exist"):
            complete(client, prompt, model="third")
    with pytest.raises(WeftError, match="an adapter has the name first as well: choose another by --model-name"):
        Service(weft.load(tmp_path / "out"), ServerSettings(name="first"))

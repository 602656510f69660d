"""Text in and out of the runtime: growing text, stop strings, streams, chat templates; a scripted decoder speaks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.core.results import ExpertCounts
from weft.backends.runtime.text import chat
from weft.backends.runtime.text.chat import ChatTemplate
from weft.backends.runtime.text.tokenizer import StopStringFilter, StreamingDetokenizer
from weft.backends.runtime.text.tokenizer import Tokenizer as Ours
from weft.ir.errors import WeftError

BOS, EOS = 256, 257


class Scripted:
    """A decoder that says what it is told, one script a row, then nothing but EOS."""

    def __init__(self, *scripts: Sequence[int], max_length: int = 1000) -> None:
        self.scripts, self.vocab, self.max_length = scripts, 300, max_length
        self.capacity, self.lengths = max_length, np.zeros(len(scripts), np.int64)
        self.max_prompt, self.start, self.cache_bytes, self.chunk = max_length, None, 0, 512
        self.said: list[list[int]] = []
        self.experts, self.sound = ExpertCounts(), None

    @contextmanager
    def context(self, batch: int, tokens: int) -> Iterator[Scripted]:
        yield self

    def reset(self) -> None:
        self.lengths[:] = 0

    def _logits(self) -> Any:
        logits = np.zeros((len(self.scripts), self.vocab), np.float32)
        for row, script in enumerate(self.scripts):
            logits[row, script[len(self.said)] if len(self.said) < len(script) else EOS] = 1
        return logits

    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int = 512, keep: int = 0) -> Any:
        self.said, self.prompts = [], prompts
        return self._logits()

    def step(self, tokens: Any, active: Any = None) -> Any:
        self.said.append(tokens.tolist())
        return self._logits()

    def new_sampling_step(self, samplers: Sequence[Any]) -> None:
        """The host draws."""

    def extend(self, tokens: Sequence[int]) -> Any:
        raise AssertionError("generating needs no extend")

    def count_cached(self, prompt: Sequence[int]) -> int:
        return 0

    def gather(self, rows: Any) -> None:
        raise AssertionError("one row has nothing to gather")

    def take(self, other: Any) -> None:
        self.lengths[:] = other.lengths


def byte_level() -> Tokenizer:
    """A token a byte, and the specials <s> </s>; text is preceded by <s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    fast.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    fast.enable_padding(length=50)
    fast.enable_truncation(3)
    return fast


def sentencepiece() -> Tokenizer:
    """Words with a leading ▁, bytes as <0xXX>, the first space dropped: as llama-2 tokenizers decode."""
    words = ["▁the", "▁cat", "s", "▁", "▁sat"]
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    return fast


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


PLAIN = byte_level()
PLAIN.no_padding()
PLAIN.no_truncation()


def ids(text: str) -> list[int]:
    """The tokens of `text`, one a byte."""
    return list(PLAIN.encode(text, add_special_tokens=False).ids)


def speaker(folder: Path, *scripts: Sequence[int], **facts: Any) -> Generator:
    return Generator(Scripted(*scripts, **facts), stop_ids=frozenset([EOS]), folder=folder)


TEXTS = [
    "",
    "plain words, and more",
    "naïve café \U0001f469\u200d\U0001f467\u200d\U0001f466 日本語 ok",  # a family of three, joined
    "👍🏽",
    "ends with 🎉",
    "a\ufffdb",
    "\ufffd",
    " leading and trailing ",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_is_the_text_and_never_breaks_a_code_point(folder: Path, text: str) -> None:
    stream = speaker(folder, ids(text)).stream("hi")
    pieces = list(stream)
    assert "".join(pieces) == text == stream.result.text == str(stream.result)
    assert all(pieces)
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)
        assert [len(piece) for piece in pieces] == [1] * len(text)
    assert stream.result.tokens == [*ids(text), EOS] and stream.result.finish == "stop"
    (result,) = speaker(folder, ids(text)).generate("hi")
    assert result.text == text and result.tokens == stream.result.tokens


def test_text_cut_inside_a_code_point_shows_what_there_is(folder: Path) -> None:
    stream = speaker(folder, ids("a👍")[:3]).stream("hi", max_tokens=3)
    assert list(stream) == ["a", "\ufffd"]
    assert stream.result.finish == "length"


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_growing_text_is_the_text_of_all_tokens(tmp_path: Path, make: Any, rng: np.random.Generator) -> None:
    make().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Ours(tmp_path)
    texts = ["the café", "日本 👩🏽!", " a  b "]
    said = [list(text.encode()) for text in texts] if make is sentencepiece else [ids(text) for text in texts]
    words = [256, 257, 258, 259, 260] if make is sentencepiece else ids("abc \n")
    for _ in range(50):
        line: list[int] = []
        for _ in range(8):
            line += said[rng.integers(3)] if rng.random() < 0.3 else [words[rng.integers(5)]]
        growing = StreamingDetokenizer(tokenizer)
        pieces = [growing.push(token) for token in line]
        assert "".join(pieces) + growing.flush() == tokenizer.decode(line)
        assert len(growing._ids) < 40


STOPS = [
    ("one two three", ["two"], "one ", "stop_string"),
    ("one two three", ["three"], "one two ", "stop_string"),
    ("one two three", ["tx", "two thx", "ree!"], "one two three", "stop"),
    ("aaab", ["aab"], "a", "stop_string"),
    ("xyz", ["xyz", "y"], "x", "stop_string"),
    ("xyz", ["yz", "xyz"], "", "stop_string"),
    ("say 👍 now", ["👍"], "say ", "stop_string"),
    ("ab\n\ncd", "\n\n", "ab", "stop_string"),
]


@pytest.mark.parametrize(("text", "stop", "wanted", "finish"), STOPS)
def test_stop_strings(folder: Path, text: str, stop: Any, wanted: str, finish: str) -> None:
    stream = speaker(folder, ids(text)).stream("hi", stop=stop)
    assert "".join(stream) == wanted
    assert stream.result.finish == finish
    (result,) = speaker(folder, ids(text)).generate("hi", stop=stop)
    assert (result.text, result.finish) == (wanted, finish)


@pytest.mark.parametrize(("text", "stop", "wanted", "finish"), STOPS)
def test_stop_strings_wherever_tokens_begin(text: str, stop: Any, wanted: str, finish: str) -> None:
    for cuts in range(2 ** (len(text) - 1)):
        stops, said, start = StopStringFilter([stop] if isinstance(stop, str) else stop), "", 0
        for end in range(1, len(text) + 1):
            if not stops.stopped and (end == len(text) or cuts >> (end - 1) & 1):
                said += stops.push(text[start:end])
                assert wanted.startswith(said)
                start = end
        assert said + stops.flush() == wanted and stops.stopped == (finish == "stop_string")


def test_a_batch_of_texts(folder: Path) -> None:
    model = speaker(folder, ids("yes"), ids("no, never"), ids("ok STOP"))
    results = model.generate(["a", "bc", [5, 6]], max_tokens=7, stop="STOP")
    assert [r.text for r in results] == ["yes", "no, nev", "ok "]
    assert [r.finish for r in results] == ["stop", "length", "stop_string"]
    assert [r.prompt for r in results] == [[BOS, *ids("a")], [BOS, *ids("bc")], [5, 6]]


def test_the_last_token_needs_no_room(folder: Path) -> None:
    model = speaker(folder, ids("abcdefgh"), max_length=6)
    assert model.generate([1, 2, 3, 4], max_tokens=None)[0].text == "abc"
    assert model.generate([1, 2, 3, 4, 5, 6], max_tokens=None)[0].text == "a"


def test_a_model_without_tokenizer(tmp_path: Path) -> None:
    model = speaker(tmp_path, [1, 2, 3])
    (result,) = model.generate([5])
    assert result.tokens == [1, 2, 3, EOS] and result.text == ""
    for call in (lambda: model.generate("hi"), lambda: model.stream([5]), lambda: model.generate([5], stop="x")):
        with pytest.raises(WeftError, match=r"tokenizer\.json: no such file"):
            call()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WeftError, match=r"tokenizer\.json: not a readable tokenizer"):
        speaker(tmp_path, [1]).generate("hi")
    with pytest.raises(WeftError, match="no folder"):
        Generator(Scripted([1])).generate("hi")


CHATML = (
    "{% for m in messages %}{{ '<|' ~ m['role'] ~ '|>' ~ m['content'] ~ eos_token ~ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be <b>rief."}, {"role": "user", "content": "Hi 👋"}]


def write_chat(folder: Path, template: Any, own: bool) -> None:
    config = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>"}
    if own:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    else:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("own", [True, False], ids=["jinja", "config"])
def test_chat(folder: Path, own: bool) -> None:
    write_chat(folder, CHATML, own)
    wanted = "<|system|>Be <b>rief.</s>\n<|user|>Hi 👋</s>\n"
    assert ChatTemplate(folder).render(MESSAGES, answer=False) == wanted
    model = speaker(folder, ids("Hello!"))
    prompt = model.chat_prompt(MESSAGES)
    assert BOS not in prompt and prompt.count(EOS) == 2  # the template writes what it wants; nothing is added
    assert "".join(model.stream(prompt)) == "Hello!"


def test_a_conversation(folder: Path) -> None:
    write_chat(folder, CHATML, own=True)
    system = {"role": "system", "content": "Be brief."}
    model = speaker(folder, ids("Yes! No"))
    talk = model.conversation([system])
    assert talk.tokenizer is model.tokenizer and talk.chat_template is model.chat_template
    asked = {"role": "user", "content": "Hi"}
    first = talk.say("Hi", max_tokens=4)
    assert first.result.prompt == model.chat_prompt([system, asked])
    assert talk.messages == [system, asked, {"role": "assistant", "content": ""}]
    assert next(first) == "Y"
    again = talk.say("Again", stop="N")  # while the first is still streaming
    assert list(first) == []
    answered = [system, asked, {"role": "assistant", "content": "Y"}, {"role": "user", "content": "Again"}]
    assert again.result.prompt == model.chat_prompt(answered)
    assert "".join(again) == "Yes! " and talk.messages[-1] == {"role": "assistant", "content": "Yes! "}
    before = talk.messages
    with pytest.raises(WeftError, match="temperature is -1"):
        talk.say("More", temperature=-1.0)
    with pytest.raises(WeftError, match="longer than the maximum"):
        talk.say("More" * 1000)
    assert talk.messages == before


def test_templates_render_as_in_transformers(folder: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = """{%- set ns = namespace(n=0) %}
    {% for m in messages %}
        {% if m.role == 'system' %}{% continue %}{% endif %}
        {% generation %}
{{ bos_token }}[{{ m.content | trim }}]{{ {'ä': m.content} | tojson }}
        {% endgeneration %}
        {% set ns.n = ns.n + 1 %}
    {% endfor %}
{{ ns.n }}{{ tools | tojson(indent=2) }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}
"""
    write_chat(folder, template, own=True)
    more: dict[str, Any] = {"tools": [{"name": "f", "type": "<x>"}], "enable_thinking": False}
    found = ChatTemplate(folder).render(MESSAGES, **more)
    (wanted,), _ = render_jinja_template([MESSAGES], chat_template=template, bos_token="<s>", eos_token="</s>", **more)
    assert found == wanted


def test_one_of_several_templates(folder: Path) -> None:
    write_chat(folder, [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}], own=False)
    assert ChatTemplate(folder).render(MESSAGES) == "yes"


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (None, MESSAGES, "no chat template"),
        ("{% for %}", MESSAGES, "cannot be parsed"),
        ("{{ raise_exception('roles must alternate') }}", MESSAGES, "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", MESSAGES, "chat_template.jinja: the chat template refuses"),
        ("{{ messages.append(1) }}", MESSAGES, "refuses"),
        ("{{ messages.__class__.__mro__ }}", MESSAGES, "refuses"),
        ("{{ 1 / 0 }}", MESSAGES, "ZeroDivisionError"),
        ("{{ 1 // (messages | length - 2) }}", MESSAGES, "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", MESSAGES, "RecursionError"),
        ("{% break %}", MESSAGES, "cannot be parsed"),
        ("{{ 'a'.center(10 ** 9) }}", MESSAGES, "memory"),
        ("{{ '%999999999d' % messages | length }}", MESSAGES, "memory"),
        (
            "{% set n = namespace(s='ab') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            [],
            "memory",
        ),
        ("{{ 'a' * (messages | length + 20_000_000) }}", MESSAGES, "characters"),
        ("{{ messages | tojson(indent=999999999) }}", MESSAGES, "memory"),
        ("x", ["hello"], "a chat message is 'hello'"),
        ("x", [{"content": "hello"}], "role"),
    ],
)
def test_bad_chats_are_refused(folder: Path, template: str | None, messages: Any, words: str) -> None:
    if template is not None:
        write_chat(folder, template, own=True)
    with pytest.raises(WeftError, match=words):
        speaker(folder, []).chat_prompt(messages)


@pytest.mark.parametrize(
    "template",
    ["{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 9 ** (9 ** 9) }}"],
)
def test_templates_that_go_on_and_on_are_ended(folder: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat.SECONDS == 2
    monkeypatch.setattr(chat, "SECONDS", 1)
    write_chat(folder, template, own=True)
    with pytest.raises(WeftError, match="the chat template takes longer than 1 seconds"):
        speaker(folder, []).chat_prompt(MESSAGES)


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, None),
        ("", {}, None),
        ([[]], {}, r"a prompt is \[\]"),
        ([1] * 1001, {}, "a prompt of 1001 tokens is longer than the maximum of 1000"),
        ([[1], [2, 300]], {}, "token 300 of a prompt is outside the vocabulary of 300"),
        ([-1], {}, "token -1 of a prompt"),
        ([1.5], {}, "a prompt is 1.5"),
        ([None], {}, "a prompt is None"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"max_tokens": 2.0}, "max_tokens is 2.0"),
        ([1], {"chunk": 0}, "chunk is 0"),
        ([1], {"stop": ["a", ""]}, "stop is"),
        ([1], {"stop": [3]}, "stop is"),
        ([1], {"top_p": 2.0}, "top_p is 2.0"),
    ],
)
def test_bad_arguments_are_refused(folder: Path, prompt: Any, options: dict[str, Any], words: str | None) -> None:
    model = speaker(folder, ids("a"))
    if words is None:
        assert [r.text for r in model.generate(prompt, **options)] == ["a"] * bool(prompt == "")
        return
    with pytest.raises(WeftError, match=words):
        model.generate(prompt, **options)
    if options:
        with pytest.raises(WeftError, match=words):
            model.stream(prompt, **options)


def test_a_stream_takes_one_prompt(folder: Path) -> None:
    several: Any = ["a", "b"]
    with pytest.raises(WeftError, match="one prompt"):
        speaker(folder, []).stream(several)

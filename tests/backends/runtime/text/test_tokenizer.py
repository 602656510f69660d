"""Tokenizers, streaming detokenization and stop strings; a scripted decoder chooses the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from weft.backends.folder_facts import Sound
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.text.tokenizer import (
    StopStringFilter,
    StreamingDetokenizer,
    Tokenizer,
    build_encoder_inputs,
    check_sound,
    measure_prompt,
    quote_prompt,
)
from weft.ir import WeftError

from .scripted import BOS, EOS, Scripted, byte_level, ids, sentencepiece, speaker

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
def test_stream_pieces_join_to_the_text_without_broken_code_points(folder: Path, text: str) -> None:
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


def test_truncated_code_point_becomes_a_replacement_character(folder: Path) -> None:
    stream = speaker(folder, ids("a👍")[:3]).stream("hi", max_tokens=3)
    assert list(stream) == ["a", "\ufffd"]
    assert stream.result.finish == "length"


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_streaming_detokenizer_equals_decoding_all_tokens(tmp_path: Path, make: Any, rng: np.random.Generator) -> None:
    make().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
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
def test_stop_string_filter_for_every_split_of_the_text(text: str, stop: Any, wanted: str, finish: str) -> None:
    for cuts in range(2 ** (len(text) - 1)):
        stops, said, start = StopStringFilter([stop] if isinstance(stop, str) else stop), "", 0
        for end in range(1, len(text) + 1):
            if not stops.stopped and (end == len(text) or cuts >> (end - 1) & 1):
                said += stops.push(text[start:end])
                assert wanted.startswith(said)
                start = end
        assert said + stops.flush() == wanted and stops.stopped == (finish == "stop_string")


def test_batch_of_prompts_gets_an_answer_each(folder: Path) -> None:
    model = speaker(folder, ids("yes"), ids("no, never"), ids("ok STOP"))
    results = model.generate(["a", "bc", [5, 6]], max_tokens=7, stop="STOP")
    assert [r.text for r in results] == ["yes", "no, nev", "ok "]
    assert [r.finish for r in results] == ["stop", "length", "stop_string"]
    assert [r.prompt for r in results] == [[BOS, *ids("a")], [BOS, *ids("bc")], [5, 6]]


def test_last_token_needs_no_cache_slot(folder: Path) -> None:
    model = speaker(folder, ids("abcdefgh"), max_length=6)
    assert model.generate([1, 2, 3, 4], max_tokens=None)[0].text == "abc"
    assert model.generate([1, 2, 3, 4, 5, 6], max_tokens=None)[0].text == "a"


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    model = speaker(tmp_path, [1, 2, 3])
    (result,) = model.generate([5])
    assert result.tokens == [1, 2, 3, EOS] and result.text == ""
    for call in (lambda: model.generate("hi"), lambda: model.stream([5]), lambda: model.generate([5], stop="x")):
        with pytest.raises(WeftError, match=r"tokenizer\.json: no such file"):
            call()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WeftError, match=r"tokenizer\.json: not a readable tokenizer"):
        speaker(tmp_path, [1]).generate("hi")
    with pytest.raises(WeftError, match="not opened from a folder"):
        Generator(Scripted([1])).generate("hi")


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


def test_stream_refuses_a_batch(folder: Path) -> None:
    several: Any = ["a", "b"]
    with pytest.raises(WeftError, match="one prompt"):
        speaker(folder, []).stream(several)


def test_tokenizer_failure_and_panic_raise_weft_error(tmp_path: Path) -> None:
    """The library raises of any kind, and its panics are no Exception."""
    tokenizers.Tokenizer(models.WordLevel({"the": 0}, unk_token="absent")).save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(tmp_path)
    assert ours.encode("the") == [0]
    with pytest.raises(WeftError, match=r"tokenizer\.json cannot encode this: .*UNK"):
        ours.encode("sky")

    class PanicException(BaseException):
        pass

    class Panicking:
        def decode(self, *_: object, **__: object) -> str:
            raise PanicException("index out of bounds")

    broken: Any = ours
    broken._fast = Panicking()
    with pytest.raises(WeftError, match="cannot decode this: index out of bounds"):
        ours.decode([0])


WAVE, MEL = Sound("input_values"), Sound("input_features", bins=4, length=6)


def test_token_ids_are_padded_on_the_right() -> None:
    inputs = build_encoder_inputs([[5, 6, 7], [8]], None)
    assert inputs["encoder_input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert inputs["encoder_attention_mask"].tolist() == [[True, True, True], [True, False, False]]


def test_sounds_are_padded_along_time() -> None:
    inputs = build_encoder_inputs([np.ones((2, 3)), np.full((2, 1), 7.0)], Sound("features", bins=2))
    assert inputs["features"].dtype == np.float32
    assert inputs["features"].tolist() == [[[1, 1, 1]] * 2, [[7, 0, 0]] * 2]
    assert inputs["encoder_attention_mask"].tolist() == [[True, True, True], [True, False, False]]


def test_fitting_sound_becomes_float32() -> None:
    for sound, shape in ((WAVE, (9,)), (MEL, (4, 6))):
        checked = check_sound(sound, np.ones(shape, np.float64))
        assert checked.dtype == np.float32 and checked.shape == shape


@pytest.mark.parametrize(
    ("sound", "prompt", "words"),
    [
        (WAVE, "a text", "a prompt is 'a text', but the model takes sound: an array of floats, a waveform [samples]"),
        (WAVE, np.ones(3, np.int64), "a prompt is an array [3], but the model takes sound"),
        (WAVE, np.ones((4, 6)), "a prompt is an array [4, 6], but the model takes a waveform [samples]"),
        (WAVE, np.ones(0), "a prompt is an array [0], but the model takes a waveform"),
        (MEL, np.ones((3, 6)), "a prompt is an array [3, 6], but the model takes a spectrogram [4, 6]"),
        (MEL, np.ones((4, 5)), "a prompt is an array [4, 5], but the model takes a spectrogram [4, 6]"),
    ],
)
def test_other_sounds_are_refused(sound: Sound, prompt: Any, words: str) -> None:
    with pytest.raises(WeftError) as caught:
        check_sound(sound, prompt)
    assert words in str(caught.value)


def test_prompts_are_measured_and_quoted() -> None:
    assert [measure_prompt(prompt) for prompt in ([1, 2, 3], np.ones(5), np.ones((80, 7)))] == [3, 5, 7]
    assert quote_prompt("x" * 100) == "'" + "x" * 59

"""Inputs of encoders: padded token ids and sounds, and prompts of the wrong shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.backends.folder_facts import Sound
from weft.backends.runtime.text.encoder_inputs import (
    build_encoder_inputs,
    check_sound,
    measure_prompt,
    quote_prompt,
)
from weft.ir import WeftError

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

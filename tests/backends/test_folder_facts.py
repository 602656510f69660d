"""Facts of compiled folders in words and paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.backends.folder_facts import FolderFacts, Sound


@pytest.mark.parametrize(
    ("sound", "words"),
    [
        (Sound("input_values"), "a waveform [samples]"),
        (Sound("input_values", length=16_000), "a waveform [16000]"),
        (Sound("input_features", bins=80), "a spectrogram [80, frames], mel bins by frames"),
        (Sound("input_features", bins=80, length=3000), "a spectrogram [80, 3000], mel bins by frames"),
    ],
)
def test_sound_is_described_by_its_shape(sound: Sound, words: str) -> None:
    assert str(sound) == words


def test_model_file_of_an_encoder_decoder_is_the_decoder() -> None:
    files = (Path("out/model.onnx"), Path("out/encoder.onnx"))
    facts = FolderFacts(Path("out"), files, "encoder-decoder", "ort-cpu", vocab=9, max_length=8)
    assert facts.model == Path("out/model.onnx")

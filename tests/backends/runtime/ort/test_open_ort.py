"""Folders of ONNX models are opened as decoders, encoders and encoder-decoders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from weft.backends.runtime.compiled_folder import read_facts
from weft.backends.runtime.ort.open_ort import open_decoder, open_encoder
from weft.ir import WeftError

from ...handmade import DIM, LONGEST, VOCAB, decoder, encoder, save

TABLES = (np.ones((VOCAB, DIM), np.float32),) * 2


def test_decoder_has_the_facts_of_its_folder(tmp_path: Path) -> None:
    opened = open_decoder(read_facts(save(tmp_path, decoder())), "cpu", 1)
    assert (opened.vocab, opened.max_length, opened.device_type, opened.start) == (VOCAB, LONGEST, "cpu", None)
    assert opened.name == str(tmp_path / "model.onnx") and opened.can_rewind
    rolling = replace(read_facts(tmp_path), rolling=frozenset({0}), compares=True)
    cache = (1, ["batch", 1, 4, 8])
    names = [f"{a}.0.{b}" for a in ("past_key_values", "present") for b in ("key", "value")]
    save(tmp_path, decoder(**dict.fromkeys(names, cache)))
    opened = open_decoder(rolling, "auto", 1)
    assert not opened.can_rewind and not opened.padded


def test_encoder_has_the_facts_of_its_folder(tmp_path: Path) -> None:
    facts = read_facts(save(tmp_path, encoder(TABLES), kind="encoder", pooling="cls", normalize=True))
    opened = open_encoder(facts, "cpu", 1)
    assert (opened.pooling, opened.normalize, opened.session.device) == ("cls", True, "cpu")


def test_device_of_the_target_is_kept(tmp_path: Path) -> None:
    facts = read_facts(save(tmp_path, decoder()))
    for open_model in (open_decoder, open_encoder):
        with pytest.raises(WeftError, match="compiled for ort-cpu, so it cannot run on CUDA"):
            open_model(facts, "cuda", None)


def test_second_file_of_an_encoder_decoder_is_its_encoder(tmp_path: Path) -> None:
    facts = read_facts(save(tmp_path, decoder()))
    onnx.save(encoder(TABLES), tmp_path / "encoder.onnx")
    both = replace(facts, kind="encoder-decoder", files=(facts.model, tmp_path / "encoder.onnx"), max_source=5)
    with pytest.raises(WeftError, match=r"encoder\.onnx: its inputs are input_ids, .* so it is not the encoder of an"):
        open_decoder(both, "cpu", 1)

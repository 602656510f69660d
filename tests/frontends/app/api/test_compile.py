"""`weft.compile`: the length of tables and caches, notes, progress, and options that have no effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import weft
from weft import MLP, Attention, Block, Decoder, Encoder, LearnedPositions, RMSNorm, WeftError

BLOCK = Block(Attention(2), MLP(8), RMSNorm())


def decoder(**more: Any) -> Decoder:
    return Decoder(11, 8, 1, BLOCK, **more)


@pytest.mark.parametrize(
    ("context", "asked", "length", "note"),
    [
        (16, None, 16, ""),
        (16, 8, 8, ""),
        (16, 17, 17, "the model states a context of 16 tokens: beyond it, up to the --max-length 17"),
        (None, None, 4096, "the model states no context length: compiled for 4096 tokens"),
        (None, 9, 9, ""),
    ],
)
def test_length_is_the_one_asked_for_else_the_context(
    context: int | None, asked: int | None, length: int, note: str, tmp_path: Path
) -> None:
    report = weft.compile(decoder(context=context), tmp_path / "out", target="onnx", max_length=asked)
    assert json.loads((tmp_path / "out" / "weft.json").read_text())["max_length"] == length
    lengths = [line for line in report.notes if "context" in line]
    assert len(lengths) == bool(note) and all(line.startswith(note) for line in lengths)


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (0, "--max-length is 0, but it must be positive"),
        (17, "--max-length 17 exceeds the model's 16 learned positions: choose at most 16"),
        (2**24 + 1, "is more than 16,777,216: choose a smaller --max-length"),
    ],
)
def test_lengths_that_tables_cannot_have_are_refused(length: int, words: str, tmp_path: Path) -> None:
    model = decoder(positions=LearnedPositions(16))
    with pytest.raises(WeftError, match=words):
        weft.compile(model, tmp_path / "out", target="onnx", max_length=length)
    assert not (tmp_path / "out").exists()


def test_progress_ends_with_all_bytes_of_the_weights(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    report = weft.compile(decoder(), tmp_path / "out", target="onnx", progress=lambda *step: steps.append(step))
    assert steps[-1] == ("weights", report.weight_bytes, report.weight_bytes) and report.weight_bytes > 0
    assert [*report.seconds] == ["load", "passes", "write"] and min(report.seconds.values()) >= 0


def test_cache_options_of_models_without_caches_are_refused(tmp_path: Path) -> None:
    model = Encoder(11, 8, 1, Block(Attention(2, causal=False), MLP(8), RMSNorm()))
    with pytest.raises(WeftError, match=r"--cache-dtype int8 has no effect here.* no attention of .* has a cache"):
        weft.compile(model, tmp_path / "out", target="torch", cache_dtype="int8")


def test_switchable_adapters_need_onnx_runtime(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="--switch-adapter needs a target that ONNX Runtime runs, not torch"):
        weft.compile(decoder(), tmp_path / "out", target="torch", switch_adapters=[tmp_path])

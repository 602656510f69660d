"""Instruction sets as numpy names them, old and new, and what a user hears of a slow one."""

from __future__ import annotations

import logging
import platform
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type

import weft
from weft.backends import cpu

from .onnx.quantized_llama import write


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (["SSE42", "AVX2", "FMA3", "AVX512F", "AVX512_SKX"], "AVX-512"),  # numpy before 2.4
        (["X86_V3", "X86_V4", "AVX512_ICL"], "AVX-512"),
        (["SSE42", "AVX", "AVX2"], "AVX2"),
        (["X86_V3"], "AVX2"),
        ([], "SSE"),
    ],
)
def test_instruction_sets(found: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(np, "show_config", lambda mode: {"SIMD Extensions": {"found": found}})
    assert cpu.detect_instruction_set.__wrapped__() == name
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cpu.detect_instruction_set.__wrapped__() == "aarch64"


def test_slow_blocks_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When they are compiled, and when they are run: that may be elsewhere."""
    source = write(tmp_path / "model.gguf", {"": Type.Q4_0})
    monkeypatch.setattr(cpu, "detect_instruction_set", lambda: "AVX-512")
    assert weft.compile(source, tmp_path / "fast", keep_blocks="all").notes == []
    weft.load(tmp_path / "fast")
    assert not caplog.records
    monkeypatch.setattr(cpu, "detect_instruction_set", lambda: "AVX2")
    assert weft.compile(source, tmp_path / "plain").notes == []
    (note,) = weft.compile(source, tmp_path / "slow", keep_blocks="all").notes
    assert note.startswith("this CPU has AVX2 and no AVX-512: products of 4- and 8-bit blocks are slower")
    with caplog.at_level(logging.WARNING, "weft"):
        weft.load(tmp_path / "plain")
        weft.load(tmp_path / "fast")
    assert [record.getMessage() for record in caplog.records] == [note]

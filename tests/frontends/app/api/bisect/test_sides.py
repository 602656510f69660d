"""Sides of a bisection: prefixes, compiled folders of all kinds, tokenizers, and what is refused."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import weft
from weft.frontends.app.api.bisect.bisection import bisect
from weft.frontends.app.api.bisect.sides import BisectionSide, open_side, split_prefix
from weft.ir import WeftError

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def opened(side: Any, trust: bool = False) -> BisectionSide:
    with ExitStack() as stack:
        return open_side(side, stack, trust)


def test_prefixes_are_split_and_unknown_ones_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_prefix("transformers:a/b") == ("transformers", "a/b")
    assert split_prefix("torch:model.py:wide") == ("torch", "model.py:wide")
    assert split_prefix("model.py:wide") == ("", "model.py:wide")
    assert split_prefix(tmp_path) == ("", tmp_path)
    with pytest.raises(
        WeftError, match=r"^nemo:x: the prefix nemo: is unknown; known are transformers:FOLDER, .*gguf$"
    ):
        split_prefix("nemo:x")
    monkeypatch.chdir(tmp_path)
    Path("nemo:x").mkdir()
    assert split_prefix("nemo:x") == ("", "nemo:x")


def test_all_sides_of_one_model_agree(llamas: tuple[Path, Path], tmp_path: Path) -> None:
    source = llamas[0]
    weft.compile(source, tmp_path / "ort")
    weft.compile(source, tmp_path / "torch", target="torch")
    half = weft.compile(source, tmp_path / "half", dtype="f16").folder
    others = {
        tmp_path / "ort": 1,
        tmp_path / "ort/model.onnx": 1,
        f"optimized:{tmp_path / 'ort'}": 1,
        tmp_path / "torch": 2,
        f"torch:{source}": 2,
        f"transformers:{source}": 2,
        transformers.LlamaForCausalLM.from_pretrained(source): 2,
    }
    for other, detail in others.items():
        assert opened(other, trust=True).detail == detail
        assert not bisect(source, other, ids=IDS, trust=True).differs, other
    found = bisect(source, half, ids=IDS)
    assert not found.differs and 1e-5 < found.errors["logits"] < found.tolerance < 0.02


def test_other_weights_differ(llamas: tuple[Path, Path]) -> None:
    found = bisect(llamas[0], f"transformers:{llamas[1]}", ids=IDS).difference
    assert found is not None and found.places[0].name == "embed"


def test_tokenizers_are_those_of_sources_and_folders(llamas: tuple[Path, Path], tmp_path: Path) -> None:
    weft.compile(llamas[0], tmp_path / "out")
    tokens = opened(llamas[0]).encode("ab")
    assert tokens == [0, 1] == opened(tmp_path / "out").encode("ab") == opened(f"transformers:{llamas[0]}").encode("ab")
    assert opened(torch.nn.Linear(2, 2)).encode("ab") is None


def test_encoder_decoders_of_transformers_read_both_inputs(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4)
    torch.manual_seed(0)
    net = transformers.T5ForConditionalGeneration(config)
    net.save_pretrained(tmp_path / "t5")
    side = opened(f"transformers:{tmp_path / 't5'}")
    assert side.has_encoder and side.vocab == 40
    assert not bisect(tmp_path / "t5", net, ids=IDS).differs


@pytest.mark.parametrize(
    ("side", "words"),
    [
        ("optimized:nowhere", "neither an ONNX file nor a compiled folder"),
        ("transformers:nowhere", r"nowhere has no config\.json"),
        ("llama.cpp:nowhere.gguf", r"nowhere\.gguf"),
        ("nowhere.onnx", r"nowhere\.onnx"),
    ],
)
def test_missing_files_are_refused(side: str, words: str, llamas: tuple[Path, Path]) -> None:
    with pytest.raises(WeftError, match=words):
        bisect(llamas[0], side, ids=IDS)


def test_code_of_folders_runs_with_trust_only(llamas: tuple[Path, Path], tmp_path: Path) -> None:
    weft.compile(llamas[0], tmp_path / "out", target="torch")
    with pytest.raises(WeftError, match="add --trust"):
        bisect(llamas[0], tmp_path / "out")

"""Tokens of exported GGUF files: as many as the embedding has rows, and all that end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import weft
from weft.frontends import load_source
from weft.frontends.export.gguf.tokens import _read_tokens
from weft.frontends.formats.gguf import GGUFTensors
from weft.ir import WeftError

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<s>", "</s>", "<|eom_id|>", "<|eot_id|>", "<stop>"]


def folder(save: Any, rows: int, **generation: Any) -> Path:
    """A model of `rows` rows with a tokenizer of 261 tokens."""
    path = Path(save("llama", vocab_size=rows, num_key_value_heads=2)[1])
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL, *LETTERS])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_a_tokenizer_of_more_tokens_than_rows_is_refused(save: Any, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="its tokenizer has 261 tokens and its embedding 260 rows"):
        weft.export(folder(save, 260), tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_every_row_has_a_token(save: Any, tmp_path: Path) -> None:
    weft.export(folder(save, 264), tmp_path / "out.gguf")
    reader = GGUFTensors(tmp_path / "out.gguf")
    tokens, types = (reader.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    assert len(tokens) == len(types) == reader.shape("token_embd.weight")[0] == 264
    assert tokens[261:] == ["[PAD261]", "[PAD262]", "[PAD263]"] and types[261] == 5


def test_all_tokens_that_end_an_answer_are_kept(save: Any, tmp_path: Path) -> None:
    source = folder(save, 264, eos_token_id=[1, 2, 3])
    weft.export(source, tmp_path / "out.gguf")
    metadata = GGUFTensors(tmp_path / "out.gguf").metadata
    ids = [metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")]
    assert [SPECIAL[i] for i in ids] == ["</s>", "<|eot_id|>", "<|eom_id|>"]
    assert sorted(load_source(tmp_path / "out.gguf").graph.meta["eos_token_ids"]) == [1, 2, 3]
    notes = list[str]()
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2, 3, 4]}))
    weft.export(source, tmp_path / "out.gguf", note=notes.append)
    assert any("three tokens that end an answer, and the model has 4: [2] are left out" in note for note in notes)


def test_the_name_of_a_tokenizer_counts_where_no_config_has_an_id(save: Any) -> None:
    source = folder(save, 264)
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot_id|>"}))
    config = json.loads((source / "config.json").read_text())
    for key in ("bos_token_id", "eos_token_id"):
        config.pop(key, None)
    (source / "config.json").write_text(json.dumps(config))
    meta = load_source(source).graph.meta
    assert meta["eos_token_ids"] == [3] and meta.get("bos_token_id") is None
    (source / "config.json").write_text(json.dumps({**config, "eos_token_id": 1}))
    assert load_source(source).graph.meta["eos_token_ids"] == [1]


def test_a_token_far_beyond_the_others_makes_no_gigabytes_of_fillers() -> None:
    class Source:
        spec = "folder"
        graph = type("Graph", (), {"meta": {"vocab": 2}})

    source: Any = Source
    with pytest.raises(WeftError, match=r"its tokenizer has a token 2147483647, beyond the maximum of 16777216"):
        _read_tokens({"model": {"type": "BPE", "vocab": {"a": 0, "b": 2**31 - 1}}}, source, 2)

"""The record of a model: remarks, hashes, origin, tokens of texts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from weft.frontends.model import Model
from weft.frontends.models.left_out import LeftOut
from weft.ir import Graph, WeftError
from weft.ir.storage import take_stamps

HEAD = LeftOut("head", "score", "of a class", changes=True)
KEY = LeftOut("key", "magic", "3")


def model(**options: Any) -> Model:
    return Model(Graph("g"), "spec", "a model", **options)


def test_parts_that_change_outputs_must_be_accepted() -> None:
    with pytest.raises(WeftError, match="accept it by --without score"):
        model(left_out=[HEAD, KEY]).notices()
    accepted = model(left_out=[HEAD, KEY], without=("score",), notes=("a note",))
    assert accepted.notices() == ["a note", "left out: key magic (3)"]
    assert model(left_out=[HEAD]).notices(strict=False) == ["left out: head score (of a class)"]


def test_hashes_distinguish_the_files_of_adapters(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "adapter_config.json").write_text(folder.name)
    files = (*(folder / "adapter_config.json" for folder in folders),)
    found = model(files=files, adapters=tuple(folders)).hashes()
    digests = {f"adapter{i}/adapter_config.json": hashlib.sha256(x).hexdigest() for i, x in enumerate((b"a", b"b"))}
    assert found == digests


def test_changed_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("a")
    made = model(stamps=take_stamps([tmp_path / "w"]))
    made.check_unchanged()
    (tmp_path / "w").write_text("ab")
    with pytest.raises(WeftError, match="w"):
        made.check_unchanged()


def test_origin_is_a_source_of_the_format_that_exists(tmp_path: Path) -> None:
    made = model()
    assert made.origin("gguf") is None
    made.graph.meta["source"] = {"format": "gguf", "path": str(tmp_path / "m.gguf")}
    assert made.origin("gguf") is None
    (tmp_path / "m.gguf").touch()
    assert made.origin("gguf") == tmp_path / "m.gguf"
    assert made.origin("safetensors") is None


def test_graphs_tokenize_by_the_written_files() -> None:
    vocab = {"a": 0, "b": 1}

    def write(folder: Path) -> None:
        body = {
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"},
            "pre_tokenizer": {"type": "Whitespace"},
        }
        (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], **body}))

    made = model(tokenizer=write)
    assert made.graph.tokenize is not None
    assert made.graph.tokenize(["a b", "b"]) == [[0, 1], [1]]
    assert model().graph.tokenize is None

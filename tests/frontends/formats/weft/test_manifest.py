"""Manifests: the contents of weft.json and provenance.json, hashes of files that may change."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.backends.target import TARGETS
from weft.frontends.formats.weft.manifest import build_manifest, build_provenance, hash_files
from weft.frontends.model import Model
from weft.frontends.models.left_out import LeftOut
from weft.ir import Graph, TensorType, WeftError, ops
from weft.ir.recipes import Source
from weft.ir.storage import take_stamps
from weft.ir.types import dtypes


def model(**options: Any) -> Model:
    """Return a model of three token embeddings of four features."""
    graph = Graph("small")
    ids = graph.add_input("input_ids", TensorType(dtypes.i64, (1, 2)))
    table = graph.add_param("embed", TensorType(dtypes.f32, (3, 4)), Source("embed"))
    graph.add_output("logits", ops.embedding(ids, table))
    graph.meta.update(vocab=3, eos_token_ids=[2], bos_token_id=1)
    return Model(graph, "small", "a small model", **options)


def manifest(made: Model, length: int = 8) -> dict[str, Any]:
    return build_manifest(made.graph, TARGETS["onnx"], "f32", length, "fold", made, {"a": "12"})


def test_manifest_describes_the_graph() -> None:
    found = manifest(model(family="llama", without=("x",), left_out=[LeftOut("key", "k", "1")]))
    assert (found["kind"], found["vocab"], found["parameters"], found["max_length"]) == ("decoder", 3, 12, 8)
    assert (found["eos_token_ids"], found["bos_token_id"], found["pad_token_id"]) == ([2], 1, None)
    assert (found["target"], found["dtype"], found["pipeline"], found["logits"]) == ("onnx", "f32", "fold", "all")
    assert found["left_out"] == [{"kind": "key", "name": "k", "detail": "1", "changes": False}]
    assert found["source"] == {
        **{"spec": "small", "description": "a small model", "seed": 0, "hashes": {"a": "12"}},
        **{"family": "llama", "without": ["x"]},
    }
    assert not found["compares_tokens"]


def test_encoder_decoders_start_with_the_first_token_that_is_known() -> None:
    made = model()
    made.graph.meta["kind"] = "encoder-decoder"
    assert manifest(made)["decoder_start_token_id"] == 1  # bos
    made.graph.meta.update(decoder_start_token_id=0, begin_tokens=[[5], [6, 7]])
    assert manifest(made)["decoder_start_token_id"] == 0
    assert manifest(made)["begin_tokens"] == [{"any_of": [5]}, {"any_of": [6, 7]}]


def test_provenance_has_the_passes_and_earlier_provenance(tmp_path: Path) -> None:
    (tmp_path / "m.py").touch()
    made = model(pipeline="fold,cast", provenance={"weft": "0"})
    made = replace(made, spec=f"{tmp_path / 'm.py'}:NAME")
    found = build_provenance(made, {})
    assert (found["pipeline"], found["source"]["provenance"]) == ("fold,cast", {"weft": "0"})
    assert found["source"]["spec"] == f"{tmp_path.absolute() / 'm.py'}:NAME"


def test_files_are_hashed_by_name(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"abc")
    with hash_files(model(files=(tmp_path / "w",))) as result:
        assert result() == {"w": hashlib.sha256(b"abc").hexdigest()}


def test_files_that_changed_since_they_were_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"abc")
    made = model(files=(tmp_path / "w",), stamps=take_stamps([tmp_path / "w"]))
    (tmp_path / "w").write_bytes(b"abcd")
    with hash_files(made) as result, pytest.raises(WeftError, match="w"):
        result()

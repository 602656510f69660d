"""Files of sentence-transformers: pooling modules, limits and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.backends.torch.transformers.embedding import write_embedding
from weft.ir import Graph, WeftError
from weft.ir.storage.documents import write_json
from weft.ir.types import dtypes

from .tiny import DIM, graph_of


def encoder(**meta: Any) -> Graph:
    graph = graph_of("encoder").clone()
    graph.meta.update(meta)
    return graph


def written(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(("pooling", "flag"), [("cls", "cls_token"), ("last", "lasttoken"), ("mean", "mean_tokens")])
def test_pooling_and_normalization_are_modules(pooling: str, flag: str, tmp_path: Path) -> None:
    write_embedding(tmp_path, encoder(pooling=pooling, normalize=True), dtypes.f32)
    modules = written(tmp_path, "modules.json")
    assert [(m["idx"], m["path"]) for m in modules] == [(0, ""), (1, "1_Pooling"), (2, "2_Normalize")]
    assert modules[1]["type"] == "sentence_transformers.models.Pooling"
    config = written(tmp_path, "1_Pooling/config.json")
    assert config["word_embedding_dimension"] == DIM
    assert [key for key, chosen in config.items() if chosen is True] == [f"pooling_mode_{flag}"]
    assert written(tmp_path, "2_Normalize/config.json") == {}
    assert not (tmp_path / "sentence_bert_config.json").exists()


def test_limits_and_prompts_are_written(tmp_path: Path) -> None:
    sentence = {"max_seq_length": 512, "do_lower_case": True, "prompts": {"query": "Q: "}, "truncate_dim": 8}
    graph = encoder(pooling="mean", sentence=sentence)
    write_embedding(tmp_path, graph, dtypes.f32, length=64)
    assert written(tmp_path, "sentence_bert_config.json") == {"max_seq_length": 64, "do_lower_case": True}
    assert written(tmp_path, "config_sentence_transformers.json") == {"prompts": {"query": "Q: "}, "truncate_dim": 8}


def test_nothing_is_written_without_pooling_or_for_decoders(tmp_path: Path) -> None:
    write_embedding(tmp_path, encoder(pooling=None), dtypes.f32)
    decoder = graph_of("dense").clone()
    write_embedding(tmp_path, decoder, dtypes.f32)
    assert list(tmp_path.iterdir()) == []


def test_module_whose_weights_a_pass_replaced_is_refused(tmp_path: Path) -> None:
    modules = [{"type": "Dense", "config": {}, "at": "dense"}]
    with pytest.raises(WeftError, match="module dense has lost its weight to a pass: leave out the passes"):
        write_embedding(tmp_path, encoder(sentence={"modules": modules}), dtypes.f32)


def test_json_is_indented_utf8(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"ä": [1]})
    assert (tmp_path / "a.json").read_bytes() == '{\n  "ä": [\n    1\n  ]\n}\n'.encode()

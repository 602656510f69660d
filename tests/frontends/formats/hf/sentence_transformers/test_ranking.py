"""The files of rerankers: tokens that score, the function of a score, prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.frontends.formats.hf.sentence_transformers.ranking import (
    check_tokens,
    find_unread_ranking,
    list_ranking_files,
    read_modules,
    read_ranking,
    read_score_tokens,
)
from weft.ir import WeftError

SCORE = "sentence_transformers.cross_encoder.modules.LogitScore"


def folder(path: Path, score: dict[str, Any] | None = None, **files: Any) -> Path:
    """Write JSON files by stem, and with `score` the folder of a LogitScore module."""
    if score is not None:
        files["modules"] = [{"type": "x.Transformer", "path": ""}, {"type": SCORE, "path": "1_LogitScore"}]
        (path / "1_LogitScore").mkdir()
        (path / "1_LogitScore" / "config.json").write_text(json.dumps(score))
    for name, contents in files.items():
        (path / f"{name}.json").write_text(json.dumps(contents))
    return path


def test_modules_have_a_subfolder_by_class(tmp_path: Path) -> None:
    assert read_modules(tmp_path) == {}
    assert read_modules(folder(tmp_path, {})) == {"Transformer": "", "LogitScore": "1_LogitScore"}


@pytest.mark.parametrize(
    ("score", "tokens"), [({"true_token_id": 5}, [5]), ({"true_token_id": 5, "false_token_id": 3}, [5, 3])]
)
def test_tokens_that_score(score: dict[str, int], tokens: list[int], tmp_path: Path) -> None:
    assert read_score_tokens(tmp_path) == []
    assert read_score_tokens(folder(tmp_path, score)) == tokens


def test_invalid_tokens_are_refused(tmp_path: Path) -> None:
    check_tokens([5], None, "f")
    check_tokens([5], 6, "f")
    with pytest.raises(WeftError, match="f: LogitScore reads token 6, but the model has only 6 tokens"):
        check_tokens([5, 6], 6, "f")
    with pytest.raises(WeftError, match="true_token_id"):
        read_score_tokens(folder(tmp_path, {"true_token_id": -1}))


@pytest.mark.parametrize(
    ("config", "stated", "activation"),
    [
        ({}, {}, "sigmoid"),
        ({}, {"activation_fn": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.Tanh"}, {"activation_fn": "torch.nn.ReLU"}, "tanh"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.ReLU"}}, {}, "relu"),
    ],
)
def test_function_of_the_score(config: dict[str, Any], stated: dict[str, Any], activation: str, tmp_path: Path) -> None:
    found = read_ranking(folder(tmp_path, config_sentence_transformers=stated), config)
    assert found == {"activation": activation, "template": False, "prompt": ""}


def test_template_and_default_prompt(tmp_path: Path) -> None:
    prompts = {"prompts": {"web": "Given a query"}, "default_prompt_name": "web"}
    found = read_ranking(folder(tmp_path, {"true_token_id": 5}, config_sentence_transformers=prompts), {})
    assert (found["template"], found["prompt"]) == (False, "Given a query")
    (tmp_path / "chat_template.jinja").touch()
    assert read_ranking(tmp_path, {})["template"]
    folder(tmp_path, sentence_bert_config={"modality_config": {"text": {}}})
    assert not read_ranking(tmp_path, {})["template"]


def test_keys_that_nothing_reads_have_their_file(tmp_path: Path) -> None:
    folder(tmp_path, {"true_token_id": 5, "magic": 1}, sentence_bert_config={"odd": True, "transformer_task": "x"})
    assert [part.name for part in find_unread_ranking(tmp_path)] == [
        "sentence_bert_config.json:odd", "1_LogitScore/config.json:magic",
    ]  # fmt: skip
    assert {file.name for file in list_ranking_files(tmp_path)} == {
        "modules.json",
        "sentence_bert_config.json",
        "config.json",
    }

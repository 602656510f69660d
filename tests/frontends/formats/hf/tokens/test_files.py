"""The files of a tokenizer: which are listed, and what their copies have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.frontends.formats.hf.tokens.files import copy_tokenizer, list_tokenizer_files
from weft.ir import WeftError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer of two words and a file that is none of its own."""
    made = tmp_path / "in"
    made.mkdir()
    tokenizer = {
        **{"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None},
        **{"pre_tokenizer": {"type": "Whitespace"}, "decoder": None},
        "added_tokens": [{"id": 1, "content": "[UNK]", "special": True}
                         | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
    }  # fmt: skip
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    (made / "config.json").write_text("{}")
    return made


def copied(folder: Path, **options: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tokenizer.json and tokenizer_config.json of a copy."""
    out = folder.parent / "out"
    out.mkdir()
    copy_tokenizer(folder, out, **options)
    assert not (out / "config.json").exists()
    return tuple(json.loads((out / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json"))


def test_only_files_of_the_tokenizer_are_listed(folder: Path) -> None:
    (folder / "merges.txt").touch()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").touch()
    assert [file.name for file in list_tokenizer_files(folder)] == ["tokenizer.json", "merges.txt", "rag.jinja"]


@pytest.mark.parametrize("types", [True, False])
def test_a_config_without_a_class_gets_one(types: bool, folder: Path) -> None:
    config = copied(folder, types=types)[1]
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert ("token_type_ids" in config["model_input_names"]) is types


def test_copies_may_lower_case_and_add_no_special_tokens(folder: Path) -> None:
    tokenizer, config = copied(folder, lower=True, plain=True)
    assert tokenizer["normalizer"] == {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}
    assert tokenizer["post_processor"] is None and config["pad_token"] == "[UNK]"


def test_several_templates_become_files(folder: Path) -> None:
    templates = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    config = copied(folder)[1]
    out = folder.parent / "out"
    assert "chat_template" not in config
    assert (out / "chat_template.jinja").read_text() == "D"
    assert (out / "additional_chat_templates" / "rag.jinja").read_text() == "R"


def test_templates_cannot_leave_their_folder(folder: Path) -> None:
    templates = [{"name": "default", "template": "D"}, {"name": "../../x", "template": "R"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    with pytest.raises(WeftError, match=r"'../../x' is not a valid name of a chat template"):
        copied(folder)


def test_an_older_vocabulary_alone_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").touch()
    with pytest.raises(WeftError, match=r"has vocab.txt but no tokenizer.json, which weft needs"):
        copied(folder)

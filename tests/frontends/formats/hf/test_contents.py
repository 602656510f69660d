"""Parts of a folder that nothing reads: files, keys of generation_config.json, towers, keys of composite configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.frontends.formats.hf.contents import (
    explain_file,
    find_unread_files,
    find_unread_generation,
    find_unread_outer,
    find_unread_towers,
    is_inside,
)


def test_files_that_may_affect_outputs_are_listed(tmp_path: Path) -> None:
    for name in ("config.json", "README.md", "modeling.py", "preprocessor_config.json", "vectors.npz"):
        (tmp_path / name).touch()
    (tmp_path / "extra").mkdir()
    found = {part.name: part.detail for part in find_unread_files(tmp_path, (tmp_path / "config.json",))}
    assert found == {
        "extra/": "not read",
        "modeling.py": "code is not run",
        "preprocessor_config.json": "inputs are not preprocessed: use the model's own library for it",
        "vectors.npz": "not read",
    }


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LICENSE.txt", "for people"),
        ("optimizer.pt", "of training"),
        ("pytorch_model.bin", "the same weights"),
        ("vectors.npz", ""),
    ],
)
def test_files_without_effect_have_a_reason(name: str, reason: str) -> None:
    assert explain_file(name).startswith(reason) and bool(explain_file(name)) == bool(reason)


@pytest.mark.parametrize(
    ("key", "value", "listed"),
    [
        ("temperature", 0.7, False),  # read
        ("output_scores", True, False),
        ("num_beams", 1, False),
        ("num_beams", 4, True),
        ("bad_words_ids", [[3]], True),
        ("bad_words_ids", None, False),
    ],
)
def test_generation_keys_that_may_change_tokens(key: str, value: Any, listed: bool) -> None:
    found = [(part.name, part.detail) for part in find_unread_generation({key: value})]
    assert found == ([(f"generation_config.json:{key}", repr(value))] if listed else [])


def test_towers_have_a_kind_by_their_name() -> None:
    parts = list(find_unread_towers({"vision_tower", "multi_modal_projector", "other"}, ["vision_tower.w", "other.w"]))
    assert [(part.kind, part.name) for part in parts] == [
        ("projector", "multi_modal_projector"), ("tensors", "other"), ("vision tower", "vision_tower"),
    ]  # fmt: skip
    assert parts[2].detail == "vision_tower.w; not needed for text input"
    assert not any(part.changes for part in parts)


def test_modules_contain_keys_below_a_dot() -> None:
    assert is_inside("a.b", ["a"]) and is_inside("a", ["a"])
    assert not is_inside("ab", ["a"])


def test_composite_configs_list_keys_of_no_tower() -> None:
    config = {"text_config": {}, "vision_config": {}, "image_token_id": 3, "magic": 5, "read": 1, "empty": None}
    assert [(part.name, part.detail) for part in find_unread_outer(config, ["read"])] == [("magic", "5")]

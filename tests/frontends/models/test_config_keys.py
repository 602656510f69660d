"""Keys of configs: two spellings of a setting, merged RoPE settings, and keys that nothing reads."""

from __future__ import annotations

from typing import Any

import pytest

from weft.frontends.models.config_keys import (
    RecordingConfig,
    Unread,
    explain,
    find_unread_keys,
    iter_leaves,
    load_facts,
    normalize_config,
)

LINEAR = {"rope_type": "linear", "factor": 2.0}


def test_reads_are_recorded_with_dotted_paths() -> None:
    config = RecordingConfig({"a": {"b": 1, "c": 2}, "d": 3, "e": {}})
    assert config["a"].get("b") == 1 and config.get("z", 5) == 5
    assert config.read == {"a", "a.b", "z"}
    assert dict(config["a"].items()) == {"b": 1, "c": 2} and "a.c" in config.read


def test_leaves_of_nested_mappings() -> None:
    config = {"a": {"b": 1}, "c": {"d": 2}, "rope_scaling": {"x": 1}}
    assert list(iter_leaves({"a": {"b": 1}, "c": 2}, None)) == [("a.b", 1), ("c", 2)]
    assert list(iter_leaves(config, {"a", "rope_scaling"})) == [("a.b", 1), ("c", {"d": 2}), ("rope_scaling", {"x": 1})]


@pytest.mark.parametrize("path", ["attention_dropout", "eos_token_id", "torch_dtype", "use_cache", "max_length"])
def test_keys_without_effect_have_a_reason(path: str) -> None:
    assert explain(path)
    assert not explain("hidden_size") and not explain("magic")


def test_nested_keys_match_by_their_last_part() -> None:
    assert not explain("inner.use_cache") and explain("inner.use_cache", {"inner": {"use_cache": True}})


def test_the_overriding_spelling_wins() -> None:
    assert load_facts()["gpt2"]["overrides"]["num_hidden_layers"] == "n_layer"
    assert normalize_config({"n_layer": 2, "num_hidden_layers": 4}, "gpt2")["n_layer"] == 4
    config = {"n_layer": 2}
    assert normalize_config(config, "gpt2") is config


def test_rope_scaling_replaces_rope_parameters() -> None:
    found = normalize_config({"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}}, "llama")
    assert found["rope_parameters"] == LINEAR and "rope_scaling" not in found


def test_original_context_of_scaled_rope_follows_from_the_config() -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0}
    both = {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_scaling": yarn}
    assert normalize_config(both, "phi3")["rope_parameters"]["original_max_position_embeddings"] == 16


def unread(config: dict[str, Any], read: Any, model_type: str = "llama", inert: tuple[str, ...] = ()) -> list[Unread]:
    return list(find_unread_keys(config, model_type, inert, read))


def test_keys_that_nothing_reads_are_found() -> None:
    found = unread(
        {"hidden_size": 3, "magic": 5, "quiet": 1, "empty": None}, lambda c: c["hidden_size"], inert=("quiet",)
    )
    assert found == [Unread("magic", 5)]
    assert str(found[0]) == "magic=5"


def test_keys_that_a_flag_turns_off_count_as_read() -> None:
    def read(c: Any) -> Any:
        return c["window"] if c.get("windowed") else None

    assert unread({"windowed": False, "window": 8}, read) == []
    assert unread({"windowed": False, "window": 8}, lambda c: c.get("windowed")) == [Unread("window", 8)]


def test_two_spellings_with_different_values_are_reported() -> None:
    found = unread({"n_layer": 2, "num_hidden_layers": 4}, lambda c: c["n_layer"], "gpt2")
    assert found == [Unread("n_layer", 2, "num_hidden_layers=4")]


def test_unknown_rope_settings_are_reported() -> None:
    config = {"rope_parameters": {**LINEAR, "magic": 1}}
    assert unread(config, lambda c: c["rope_parameters"]["factor"]) == [Unread("rope_parameters.magic", 1)]

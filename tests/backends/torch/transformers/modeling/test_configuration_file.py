"""Config classes: fields, tables of layer classes, and kinds of caches for any number of layers."""

from __future__ import annotations

from typing import Any

import pytest

from weft.backends.torch.transformers.modeling.configuration_file import (
    Configuration,
    _find_period,
    count_layer_states,
    write_configuration,
)

from ..tiny import base_of, modeling_of


def config_of(name: str, **more: Any) -> Configuration:
    return write_configuration(modeling_of(name), "Tiny", "tiny", {"base_model_tp_plan": {"a": "colwise"}}, more)


def load(configuration: Configuration) -> Any:
    """Run the source; return its class TinyConfig without the base class of transformers."""
    text = configuration.text.replace("from transformers import PreTrainedConfig", "PreTrainedConfig = object")
    names: dict[str, Any] = {}
    exec(compile(text, "configuration_tiny.py", "exec"), names)
    return names["TinyConfig"]


def test_fields_begin_with_vocabulary_width_and_layers() -> None:
    configuration = config_of("dense", use_cache=True, pad_token_id=None)
    assert list(configuration.fields)[:4] == ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
    assert configuration.fields["num_hidden_layers"] == 3 and configuration.fields["use_cache"] is True
    kind = load(configuration)
    annotations = kind.__annotations__
    assert (annotations["rms_norm_eps"], annotations["use_cache"]) == ("float", "bool")
    assert (annotations["pad_token_id"], kind.vocab_size) == ("int | None", 60)
    assert (kind.model_type, kind.base_model_tp_plan) == ("tiny", {"a": "colwise"})
    assert not hasattr(kind, "layer_types")


def test_pattern_of_layers_is_repeated() -> None:
    config = load(config_of("windows"))()
    assert config.blocks == ["WindowBlock", "WindowBlock", "GlobalBlock"]
    config.num_hidden_layers = 4
    assert config.layer_types == ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]
    config.block_types = ["GlobalBlock"]
    assert config.layer_types == ["full_attention"] * 4


def test_first_recurrent_cache_counts_tokens_without_keys() -> None:
    assert load(config_of("mamba"))().layer_types == ["hybrid", "linear_attention"]


@pytest.mark.parametrize(("names", "period"), [("abab", "ab"), ("aba", "ab"), ("aaa", "a"), ("abc", "abc"), ("", "")])
def test_shortest_period(names: str, period: str) -> None:
    assert "".join(_find_period(list(names))) == period


def test_states_of_a_layer_are_counted() -> None:
    assert [count_layer_states(base_of(name).lowered) for name in ("dense", "mamba")] == [0, 2]

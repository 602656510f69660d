"""Classes for transformers: constructors that read the config, and forwards that pass caches."""

from __future__ import annotations

from weft.backends.torch.transformers.modeling.model_classes import read_config

from ..tiny import base_of


def test_sizes_are_read_once_in_the_constructor() -> None:
    lines, init = (
        ["y = x.view(config.width) * config.scale", "return f'{self.config.a}'"],
        ["self.map = f(config.width)"],
    )
    read_config(lines, init)
    assert lines == ["y = x.view(self.width) * self.scale", "return f'{self.config.a}'"]
    assert init == ["self.width = config.width", "self.scale = config.scale", "self.map = f(config.width)"]


def test_sizes_with_the_name_of_an_attribute_are_read_from_the_config() -> None:
    lines, init = ["return x * config.scale"], ["self.scale = f()"]
    read_config(lines, init)
    assert lines == ["return x * self.config.scale"] and init == ["self.config = config", "self.scale = f()"]


def test_model_itself_has_its_config() -> None:
    lines, init = ["return x * config.scale"], ["pass"]
    read_config(lines, init, top=True)
    assert lines == ["return x * self.config.scale"] and init == []


def test_attention_has_its_attributes_and_a_cache_number() -> None:
    classes = {c.name: c for c in base_of("dense").classes}
    assert classes["Attention"].init[:3] == [
        "self.config, self.layer_idx, self.is_causal = config, layer_idx, True",
        "self.head_dim = config.head_dim",
        "self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads",
    ]
    assert classes["Attention"].parameters[-1] == classes["Block"].parameters[-1] == "past_key_values: Cache | None"
    assert not any("past_key_values" in p for p in classes["FeedForward"].parameters)
    assert "self.attn = Attention(config, layer_idx)" in classes["Block"].init


def test_layers_are_as_many_as_the_config_says() -> None:
    assert "self.layers = nn.ModuleList(Block(config, layer_idx) for layer_idx in range(config.num_hidden_layers))" in (
        base_of("dense").main_class.init
    )
    mixed = "BLOCKS[kind](config, layer_idx) for layer_idx, kind in enumerate(config.blocks)"
    assert f"self.layers = nn.ModuleList({mixed})" in base_of("windows").main_class.init


def test_encoders_take_no_cache() -> None:
    base = base_of("encoder")
    assert not any("past_key_values" in p for c in base.writer.classes.values() for p in c.parameters)
    assert "Attention(config, None)" not in str(base.main_class.init)

"""Configs of published encoder-decoders have their parameters; what configs leave out is transformers' default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from weft.frontends import load_source
from weft.frontends.models.families import FAMILIES, build
from weft.passes.analysis.costs import count_parameters

from ..sampling import each
from .seq2seq import SEQ2SEQ

T5_BASE = {
    "d_model": 768, "d_kv": 64, "num_heads": 12, "num_layers": 12, "vocab_size": 32128, "is_encoder_decoder": True,
    "relative_attention_num_buckets": 32, "layer_norm_epsilon": 1e-06,
}  # fmt: skip
MT5_SMALL = {
    "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip
LARGE = {
    "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
    "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "max_position_embeddings": 1024,
}  # fmt: skip
SINUSOIDS = {"static_position_embeddings": True, "scale_embedding": True, "max_position_embeddings": 512}

# name -> model_type, parameters (sinusoids not counted), whether the head is a tensor of its own, config as published
PUBLISHED: dict[str, tuple[str, int, bool, dict[str, Any]]] = {
    "t5-base": ("t5", 222_903_552, False, {**T5_BASE, "d_ff": 3072, "n_positions": 512}),
    "flan-t5-base": ("t5", 247_577_856, True, {
        **T5_BASE, "d_ff": 2048, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
        "num_decoder_layers": 12, "n_positions": 512,
    }),
    "mt5-small": ("mt5", 300_176_768, True, {**MT5_SMALL, "vocab_size": 250112}),
    "umt5-small": ("umt5", 306_601_984, True, {**MT5_SMALL, "vocab_size": 256384, "scalable_attention": True}),
    "switch-base-8": ("switch_transformers", 619_339_008, False, {
        **T5_BASE, "d_ff": 3072, "num_decoder_layers": 12, "num_experts": 8, "expert_capacity": 64,
        "num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6, "feed_forward_proj": "relu",
        "router_bias": False, "router_dtype": "float32", "router_type": "tokens_masked",
    }),
    "bart-base": ("bart", 139_420_416, False, {
        **LARGE, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
        "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "vocab_size": 50265,
    }),
    "bart-large-cnn": ("bart", 406_290_432, False, {**LARGE, "vocab_size": 50264, "scale_embedding": False}),
    "mbart-large-50": ("mbart", 610_879_488, False, {
        **LARGE, "vocab_size": 250054, "activation_function": "relu", "scale_embedding": True,
    }),
    "opus-mt-en-de": ("marian", 73_886_208, False, {
        **LARGE, **SINUSOIDS, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
        "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "vocab_size": 58101,
        "activation_function": "swish",
    }),
    "pegasus-xsum": ("pegasus", 568_699_904, False, {
        **LARGE, **SINUSOIDS, "encoder_layers": 16, "decoder_layers": 16, "vocab_size": 96103,
        "activation_function": "relu",
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_their_parameters(name: str) -> None:
    model_type, parameters, untied, config = PUBLISHED[name]
    keys = frozenset({"lm_head.weight"} if untied else ())
    assert count_parameters(build(FAMILIES[model_type].read(config, keys, "config.json")).graph()) == parameters


@pytest.mark.parametrize("name", each(2, SEQ2SEQ))
def test_absent_keys_mean_the_defaults_of_transformers(name: str, tmp_path: Path) -> None:
    row = SEQ2SEQ[name]
    row.save(tmp_path)
    graph = load_source(tmp_path).graph
    config = json.loads((tmp_path / "config.json").read_text())
    kind: Any = getattr(transformers, row.model).config_class
    defaults = json.loads(kind().to_json_string(use_diff=False))
    kept = {"model_type", *(key for key in config if key.endswith("_token_id"))}
    absent = {key for key, value in config.items() if key in defaults and defaults[key] == value} - kept
    assert len(absent) > 3
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in absent}))
    assert load_source(tmp_path).graph == graph

"""Configs as tables read them: older spellings mean the same as in transformers, and some are refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import transformers

from weft.frontends.models.families import FAMILIES, build
from weft.ir import WeftError, print_graph

from ...e2e.families import COMMON, GQA

FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
ORIGINAL = {"original_max_position_embeddings": 16}
# model_type -> configs as they were written before transformers 5
OLDER: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
         | {"original_max_position_embeddings": 32}},
    ],
    "gpt_neox": [{"rotary_pct": 0.5, "rotary_emb_base": 20_000}],
    "phi": [{"partial_rotary_factor": 0.25, "rope_theta": 5e4}],
    "phi3": [
        {"rope_scaling": {"type": kind, **FACTORS, **ORIGINAL}, **ORIGINAL}
        for kind in ("longrope", "su", "yarn")
    ],
    "gemma": [{"hidden_act": "gelu"}, {"hidden_activation": None, "hidden_act": "gelu_pytorch_tanh"}],
    "gemma2": [{"hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}],
    "gemma3_text": [
        {"sliding_window_pattern": 2, "rope_theta": 2e6, "rope_local_base_freq": 5e3},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
    "stablelm": [{"partial_rotary_factor": 0.5, "rope_theta": 1e5}],
    "falcon": [{"rope_theta": 1e5}],
    "cohere": [{"rope_theta": 1e6}],
    "qwen2": [{"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "rope_theta": 1e6}],
    "smollm3": [{"no_rope_layers": [1, 0, 0], "rope_theta": 5e6}],
}  # fmt: skip


# Configs of published checkpoints, in the words they were published in, and how many parameters those have.
PUBLISHED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "falcon-7b": ("falcon", 6_921_720_704, {
        "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "vocab_size": 65024,
        "alibi": False, "bias": False, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True,
    }),
    "mpt-7b": ("mpt", 6_649_286_656, {
        "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432, "max_seq_len": 2048, "no_bias": True,
        "expansion_ratio": 4, "embedding_fraction": 1.0, "logit_scale": None, "learned_pos_emb": True,
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "clip_qkv": None, "qk_ln": False},
    }),
    "phi-2": ("phi", 2_779_683_840, {
        "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "vocab_size": 51200, "partial_rotary_factor": 0.4, "rope_scaling": None,
    }),
    "phi-3-mini": ("phi3", 3_821_079_552, {
        "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "vocab_size": 32064, "max_position_embeddings": 4096, "sliding_window": 2047,
        "original_max_position_embeddings": 4096, "rope_scaling": None, "rope_theta": 10000.0,
    }),
    "gemma-2b": ("gemma", 2_506_172_416, {
        "hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8, "num_hidden_layers": 18,
        "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256000, "hidden_act": "gelu",
    }),
    "gemma-2-2b": ("gemma2", 2_614_341_888, {
        "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000, "query_pre_attn_scalar": 256,
    }),
    "gemma-3-1b": ("gemma3_text", 999_885_952, {
        "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
        "sliding_window_pattern": 6, "rope_local_base_freq": 10000, "rope_theta": 1000000, "rope_scaling": None,
    }),
    "pythia-160m": ("gpt_neox", 162_322_944, {
        "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
        "vocab_size": 50304, "max_position_embeddings": 2048, "rotary_pct": 0.25, "rotary_emb_base": 10000,
    }),
    "gpt-j-6b": ("gptj", 6_050_882_784, {
        "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048, "n_inner": None, "rotary_dim": 64,
        "vocab_size": 50400, "rotary": True, "scale_attn_weights": True,
    }),
    "gpt-neo-125m": ("gpt_neo", 125_198_592, {
        "hidden_size": 768, "intermediate_size": None, "num_heads": 12, "num_layers": 12, "vocab_size": 50257,
        "max_position_embeddings": 2048, "window_size": 256, "attention_types": [[["global", "local"], 6]],
    }),
    "bloom-560m": ("bloom", 559_214_592, {
        "hidden_size": 1024, "num_attention_heads": 16, "n_layer": 24, "vocab_size": 250880, "seq_length": 2048,
    }),
    "olmo-1b": ("olmo", 1_176_764_416, {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "vocab_size": 50304, "clip_qkv": None, "tie_word_embeddings": True,
    }),
    "stablelm-2-1.6b": ("stablelm", 1_644_515_328, {
        "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_hidden_layers": 24,
        "num_key_value_heads": 32, "vocab_size": 100352, "use_qkv_bias": True, "partial_rotary_factor": 0.25,
    }),
    "starcoder2-3b": ("starcoder2", 3_030_371_328, {
        "hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 24, "num_hidden_layers": 30,
        "num_key_value_heads": 2, "vocab_size": 49152, "sliding_window": 4096, "use_bias": True,
    }),
    "smollm3-3b": ("smollm3", 3_075_098_624, {
        "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "vocab_size": 128256, "no_rope_layer_interval": 4, "rope_theta": 5000000.0,
    }),
    "command-r": ("cohere", 34_980_831_232, {
        "hidden_size": 8192, "intermediate_size": 22528, "num_attention_heads": 64, "num_hidden_layers": 40,
        "num_key_value_heads": 64, "vocab_size": 256000, "logit_scale": 0.0625, "rope_theta": 8000000.0,
    }),
    "opt-125m": ("opt", 125_239_296, {
        "hidden_size": 768, "ffn_dim": 3072, "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 50272,
        "max_position_embeddings": 2048, "word_embed_proj_dim": 768, "_remove_final_layer_norm": False,
    }),
    "albert-base": ("albert", 11_092_992, {
        "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
        "vocab_size": 30000, "embedding_size": 128, "max_position_embeddings": 512, "inner_group_num": 1,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_their_parameters(name: str) -> None:
    model_type, parameters, config = PUBLISHED[name]
    graph = build(FAMILIES[model_type].read(config, frozenset(), "config.json")).graph()
    assert sum(math.prod(p.shape) for p in graph.params.values() if not p.recipe.is_constant) == parameters


def text(model_type: str, config: dict[str, Any]) -> str:
    """The graph of a config, without its weights' names."""
    return print_graph(build(FAMILIES[model_type].read(config, frozenset(), "config.json")).graph())


def standard(model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    """The config as transformers completes it."""
    made = transformers.AutoConfig.for_model(model_type, **json.loads(json.dumps(config)))
    found: dict[str, Any] = json.loads(made.to_json_string(use_diff=False))
    return found


@pytest.mark.parametrize(("model_type", "config"), [(t, c) for t, configs in OLDER.items() for c in configs])
def test_older_keys_equal_newer_ones(model_type: str, config: dict[str, Any]) -> None:
    whole = {**COMMON, **GQA, **config}
    assert text(model_type, whole) == text(model_type, standard(model_type, whole))


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        (
            "mpt",
            {"attn_config": {"qk_ln": True}},
            "^config.json: attn_config.qk_ln=True is not supported for mpt models$",
        ),
        ("mpt", {"attn_config": {"alibi": False}}, "^config.json: attn_config.alibi=False is not supported for mpt"),
        ("mpt", {"attn_config": 3}, "^config.json: attn_config=3 is not a mapping$"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim=32 must be hidden_size="),
        ("mpt", {"logit_scale": 0.5}, "logit_scale=0.5 is not supported for mpt models"),
        ("albert", {"num_hidden_groups": 2}, "shared_layers=2 must divide layers=3"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "needs the config key 'long_factor'"),
        ("gpt_neo", {"attention_types": [[["global"], 2]]}, "window has 2 values, but needs one for each of 3 layers"),
    ],
)
def test_inexpressible_configs_are_refused(model_type: str, config: dict[str, Any], message: str) -> None:
    names = {"num_layers": 3, "num_heads": 4, "d_model": 64, "n_layers": 3, "n_heads": 4}
    with pytest.raises(WeftError, match=message):
        text(model_type, {**COMMON, **names, **config})

"""What tables read from configs: older spellings mean what they mean to transformers, and some are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from weft.frontends.families import FAMILIES, build
from weft.ir import WeftError, print_graph

from ..e2e.families import COMMON, GQA

FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
# model_type -> configs as they were written before transformers 5
OLDER: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
         | {"original_max_position_embeddings": 32}},
    ],
    "gpt_neox": [{"rotary_pct": 0.5, "rotary_emb_base": 20_000}],
    "phi": [{"partial_rotary_factor": 0.25, "rope_theta": 5e4}],
    "phi3": [{"rope_scaling": {"type": "longrope", **FACTORS}, "original_max_position_embeddings": 16}],
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


def text(model_type: str, config: dict[str, Any]) -> str:
    """The graph of a config, without its weights' names."""
    return print_graph(build(FAMILIES[model_type].read(config, frozenset(), "config.json")).graph())


def standard(model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    """The config as transformers completes it."""
    made = transformers.AutoConfig.for_model(model_type, **json.loads(json.dumps(config)))
    found: dict[str, Any] = json.loads(made.to_json_string(use_diff=False))
    return found


@pytest.mark.parametrize(("model_type", "config"), [(t, c) for t, configs in OLDER.items() for c in configs])
def test_older_spellings_mean_what_newer_ones_do(model_type: str, config: dict[str, Any]) -> None:
    whole = {**COMMON, **GQA, **config}
    assert text(model_type, whole) == text(model_type, standard(model_type, whole))


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln=True is not supported"),
        ("mpt", {"attn_config": 3}, "attn_config=3 is no mapping"),
        ("mpt", {"logit_scale": 0.5}, "logit_scale=0.5 is not supported for mpt models"),
        ("albert", {"num_hidden_groups": 2}, "shared_layers=2 does not divide layers=3"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "needs 'long_factor'"),
        ("gpt_neo", {"attention_types": [[["global"], 2]]}, "2 layer types are given for 3 layers"),
    ],
)
def test_configs_that_no_table_expresses(model_type: str, config: dict[str, Any], message: str) -> None:
    names = {"num_layers": 3, "num_heads": 4, "d_model": 64, "n_layers": 3, "n_heads": 4}
    with pytest.raises(WeftError, match=message):
        text(model_type, {**COMMON, **names, **config})

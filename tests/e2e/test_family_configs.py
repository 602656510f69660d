"""Defaults of absent config keys equal those of transformers; settings that a family's table cannot express are
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from weft.frontends import load_source
from weft.frontends.models.families import FAMILIES, build
from weft.ir import WeftError
from weft.passes.analysis.costs import count_parameters

from ..sampling import each
from .families import ROWS
from .published import PUBLISHED

DECODERS = [name for name, row in ROWS.items() if row.is_decoder]
SIZES = {"hidden_size", "num_experts_per_tok", "n_shared_experts"}  # needed, whatever their default


def edited(folder: Path, *absent: str, **changes: Any) -> Path:
    """`folder`, with keys of its config taken out or changed."""
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in absent}))
    return folder


@pytest.mark.parametrize("name", each(5, DECODERS))
def test_absent_keys_mean_the_defaults_of_transformers(name: str, tmp_path: Path) -> None:
    model: Any = ROWS[name].save(tmp_path)
    graph = load_source(tmp_path).graph
    defaults = json.loads(type(model.config)().to_json_string(use_diff=False))
    config = json.loads((tmp_path / "config.json").read_text())
    kept = SIZES | {key for key in config if key.endswith("_token_id")}
    absent = {key for key, value in config.items() if key in defaults and defaults[key] == value} - kept
    assert len(absent - {"model_type"}) > 3
    edited(tmp_path, *absent - {"model_type"})
    assert load_source(tmp_path).graph == graph


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "clipped norms": ("olmoe", {"clip_qkv": 3.0}, "clip_qkv=3.0 is not supported for olmoe models"),
    "latent biases": ("deepseek-v3", {"attention_bias": True}, "attention_bias=True is not supported for deepseek_v3"),
    "other routing": ("deepseek-v2-lite", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
    "renormalized": ("deepseek-v2-lite", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
    "groups": ("deepseek-v2-groups", {"n_group": None}, r"key 'n_group' is missing \(for moe of deepseek_v2"),
    "limited steps": ("mamba2", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit=\[0.0, 0.1\] is not supported"),
    "activation of the state": ("mamba", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for mamba models"),
    "activation": ("mixtral", {"hidden_act": "mish"}, r"hidden_act='mish' is unknown; .* \(for moe of mixtral"),
    "too many": ("mixtral", {"num_experts_per_tok": 5}, "MoE: k=5 exceeds the 4 experts to choose from"),
    "no experts": ("qwen3-moe", {"num_local_experts": None}, "key 'num_experts' is missing"),
    "landmarks": (
        "nystromformer",
        {"num_landmarks": 32},
        "num_landmarks=32 must equal segment_means_seq_len=64, which means full attention",
    ),
    "blocks": ("big_bird", {"attention_type": "sparse"}, "attention_type='sparse' is unknown"),
    "quantized": (
        "gpt-oss",
        {"quantization_config": {"quant_method": "quark"}},
        r"quantization by quark is not supported, only by .*mxfp4",
    ),
    "fewer experts": (
        "qwen3-moe",
        {"num_local_experts": 3},
        r"does not fit layers.0.ffn.router.weight \[3, 64\] of the config",
    ),
    "wider experts": (
        "qwen3-moe",
        {"moe_intermediate_size": 40},
        r"does not fit layers.0.ffn.experts.gate \[4, 40, 64\]",
    ),
}


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_inexpressible_settings_are_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    ROWS[name].save(tmp_path)
    edited(tmp_path, **changes)
    with pytest.raises(WeftError, match=message) as e:
        load_source(tmp_path)
    assert str(tmp_path) in str(e.value)


def test_infinite_step_limits_are_accepted(tmp_path: Path) -> None:
    """Older configs spell infinity as Python's json does."""
    ROWS["mamba2"].save(tmp_path)
    graph = load_source(tmp_path).graph
    assert load_source(edited(tmp_path, time_step_limit=[0.0, float("inf")])).graph == graph


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_their_parameters(name: str) -> None:
    """Their words mean what transformers takes them for, and make as many parameters as were published."""
    model_type, parameters, published = PUBLISHED[name]
    family, keys = FAMILIES[model_type], frozenset[str]()
    found = family.read(published, keys, name)
    rewritten = transformers.AutoConfig.for_model(model_type, **published).to_json_string(use_diff=False)
    assert found == family.read(json.loads(rewritten), keys, name)
    assert count_parameters(build(found).graph()) == parameters


FUSED = ["mixtral", "qwen2-moe-mixed", "qwen3-moe", "olmoe", "granitemoe", "granite-hybrid", "deepseek-v3", "jamba"]


@pytest.mark.parametrize("name", FUSED)
def test_stacked_experts_are_read(name: str, tmp_path: Path) -> None:
    """Checkpoints in the form in which transformers holds experts in memory are the same models."""
    model: Any = ROWS[name].save(tmp_path / "hf")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    usual, fused = (load_source(tmp_path / folder) for folder in ("hf", "fused"))
    assert any(key.endswith("experts.gate_up_proj") for p in fused.graph.params.values() for key in p.recipe.sources())
    assert (fused.unread, fused.ignored) == ([], [])
    for parameter, param in usual.graph.params.items():
        other = fused.graph.params[parameter]
        values = param.recipe.evaluate(usual.graph.reader), other.recipe.evaluate(fused.graph.reader)
        np.testing.assert_array_equal(*values)

"""Configs of Hugging Face families for the settings of a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.frontends.dsl import MoE
from weft.frontends.export.hf.configs import list_families, propose_config
from weft.frontends.models.families import FAMILIES, Settings
from weft.ir import WeftError

from ..graphs import SETTINGS


def test_families_have_the_classes_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = {name: FAMILIES[name].transformers for name in list_families()}
    assert {name: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in classes} == classes


def test_the_plainest_family_is_proposed_first() -> None:
    families = """llama mistral qwen3 qwen2 gpt2 gpt_neox phi gemma gemma2 gemma3_text olmo2 olmo granite smollm3
        starcoder2 stablelm cohere gptj gpt_neo gpt_bigcode phi3 mixtral qwen3_moe qwen2_moe olmoe
        granitemoe bitnet arcee seed_oss helium glm glm4 ministral exaone4 olmo3 hunyuan_v1_dense
        ernie4_5 nemotron cwm internlm3 iquestcoder cohere2 persimmon codegen flex_olmo minimax_m2"""
    assert list_families() == families.split()


def test_config_of_a_llama_has_its_keys() -> None:
    config = propose_config("llama", SETTINGS)
    assert config.items() >= {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "hidden_act": "silu",
        "max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }.items()  # fmt: skip
    assert not config.keys() & {"sliding_window", "n_embd", "num_experts"}  # keys that the family does not read


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", SETTINGS),
        ("mistral", replace(SETTINGS, window=8)),
        ("qwen3", replace(SETTINGS, qk_norm="head", tie=True)),
        ("gpt2", replace(SETTINGS, rope=None, learned_positions=64, kv_heads=None, norm="layer", activation="gelu")),
        ("mixtral", replace(SETTINGS, ffn=None, moe=MoE(8, 12, 2))),
    ],
)
def test_proposed_config_reads_back_as_the_settings(name: str, settings: Settings) -> None:
    family = FAMILIES[name]
    read = family.read(propose_config(name, settings), frozenset(), "config.json")
    for field in ("vocab", "dim", "layers", "heads", "context", "window", "qk_norm", "tie", "activation"):
        assert getattr(read, field) == getattr(settings, field), field


def test_activation_without_a_name_is_refused() -> None:
    with pytest.raises(WeftError, match="activation 'bump' has no name in Hugging Face configs"):
        propose_config("llama", replace(SETTINGS, activation="bump"))

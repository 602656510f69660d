"""Configs of Hugging Face families for the settings of a graph."""

from __future__ import annotations

from weft.frontends.export.hf.configs import list_families
from weft.frontends.models.families import FAMILIES


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

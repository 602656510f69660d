"""GGUF metadata for the settings of a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import MoE, RoPE
from weft.frontends.export.gguf import keys
from weft.frontends.models.families import index_tables
from weft.ir import MemoryReader, WeftError

from ..graphs import SETTINGS, decoder

TABLES = index_tables()


def test_the_plainest_architecture_is_proposed_first() -> None:
    architectures = """llama qwen2 qwen3 gemma gemma2 gemma3 phi2 phi3 gpt2 gptneox starcoder2 stablelm olmo2 olmo
        granite smollm3 command-r qwen2moe qwen3moe olmoe granitemoe arcee seed_oss hunyuan-dense nemotron cohere2"""
    assert keys.list_architectures(None) == (None, architectures.split())
    assert keys.list_architectures("gemma3_text")[1][:2] == ["gemma3", "llama"]


def test_metadata_states_the_settings_of_a_llama() -> None:
    metadata = keys.propose_metadata(TABLES["llama"], SETTINGS)
    assert metadata.items() >= {
        "embedding_length": 16, "block_count": 2, "attention.head_count": 4, "attention.head_count_kv": 2,
        "feed_forward_length": 24, "context_length": 64, "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10_000.0, "rope.dimension_count": 4,
    }.items()  # fmt: skip
    assert not metadata.keys() & {"attention.sliding_window", "attention.layer_norm_epsilon", "expert_count"}
    experts = keys.propose_metadata(TABLES["llama"], replace(SETTINGS, ffn=None, moe=(None, MoE(8, 12, 2))))
    facts = [experts[f"expert_{name}"] for name in ("count", "used_count", "feed_forward_length")]
    assert facts == [8, 2, 12] and experts["feed_forward_length"] == 12


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"rope": RoPE(dim=2)}, r"llama requires RoPE on all \d+ features of a head"),
        ("gemma", {}, "gemma requires a head that is tied to the embedding"),
        ("qwen2moe", {}, "qwen2moe requires mixtures of experts"),
        ("qwen2", {"moe": MoE(8, 12, 2)}, "qwen2 does not support mixtures of experts"),
        ("phi2", {"head_dim": 3, "tie": False}, r"phi2 requires the head size width / heads = \d+ / \d+ heads, not 3"),
    ],
)
def test_settings_that_a_loader_does_not_support_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        keys.propose_metadata(TABLES[name], replace(SETTINGS, **changes))


def test_tensors_whose_presence_implies_settings() -> None:
    names = keys.list_tensor_names(TABLES["llama"], SETTINGS)
    assert names == {"output.weight", "blk.0.ffn_norm.weight"}
    tied = replace(SETTINGS, tie=True, qk_norm="head", arrangement="parallel")
    assert keys.list_tensor_names(TABLES["qwen3"], tied) == {"blk.0.attn_q_norm.weight"}
    assert "blk.0.attn_q.bias" in keys.list_tensor_names(TABLES["qwen2"], SETTINGS)  # its loader requires it


def test_llama3_scaling_is_stored_as_divisors_of_frequencies() -> None:
    scaled = RoPE(500.0, scaling="llama3", factor=8.0, original=16)
    graph, reference = (decoder(attention={"rope": rope}) for rope in (scaled, RoPE(500.0)))
    divided, tensors = keys.divide_frequencies(graph, reference)
    (divisors,) = tensors.values()
    values = divisors.recipe.evaluate(MemoryReader({}))
    ours, theirs = (g.params["rope.frequencies"].recipe.evaluate(g.reader) for g in (graph, reference))
    np.testing.assert_allclose(theirs / values, ours, rtol=1e-6)
    np.testing.assert_allclose(divided.params["rope.frequencies"].recipe.evaluate(divided.reader), ours, rtol=1e-6)
    assert keys.divide_frequencies(reference, reference) == (reference, {})


def test_longrope_divisors_are_both_lists() -> None:
    rope = RoPE(scaling="longrope", factor=4.0, original=16, factors=(1.0, 2.0), long_factors=(3.0, 4.0))
    lists = keys.list_divisors(replace(SETTINGS, rope=rope))
    assert sorted(tensor.recipe.evaluate(MemoryReader({})).tolist() for tensor in lists.values()) == [[1, 2], [3, 4]]
    assert keys.list_divisors(SETTINGS) == {}
    with pytest.raises(WeftError, match="RoPE of scaling longrope lacks long_factors"):
        keys.list_divisors(replace(SETTINGS, rope=replace(rope, long_factors=())))

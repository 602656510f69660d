"""The sizes that tell architectures apart are those that their papers give."""

from __future__ import annotations

import pytest

from weft import ALiBi, Attention, Block, Decoder, GatedMLP, LinearAttention, Mamba, MoE, RMSNorm, relu, run_passes
from weft.frontends import load_source
from weft.frontends.app.api.inspect.dimensions import Dimensions, Experts, find_dimensions
from weft.ir.types import TensorType, dtypes

PUBLISHED = {
    # width, heads, KV heads, width of a head, feed-forward
    "gpt2": (768, 12, 12, 64, 3072),
    "gpt3-175b": (12_288, 96, 96, 128, 49_152),
    "bert-base": (768, 12, 12, 64, 3072),
    "transformer-base": (512, 8, 8, 64, 2048),
    "t5-base": (768, 12, 12, 64, 3072),
    "t5-v1.1-base": (768, 12, 12, 64, 2048),
    "llama2-70b": (8192, 64, 8, 128, 28_672),
    "llama3.1-405b": (16_384, 128, 8, 128, 53_248),
    "mistral-7b": (4096, 32, 8, 128, 14_336),
    "qwen2.5-3b": (2048, 16, 2, 128, 11_008),
    "smollm2-135m": (576, 9, 3, 64, 1536),
}


def of(preset: str) -> Dimensions:
    return find_dimensions(load_source(preset).graph)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_dimensions_of_presets_are_the_published_ones(preset: str) -> None:
    found = of(preset)
    told = (found.width, found.heads, found.kv_heads, found.head_dim, found.hidden)
    assert told == tuple((size,) for size in PUBLISHED[preset])
    assert not found.experts and not found.shared and not found.latent and not found.recurrences


def test_experts_of_presets() -> None:
    assert of("mixtral-8x7b").experts == (Experts(8, 14_336, 2),)
    assert of("mixtral-8x7b").hidden == ()
    assert of("qwen3-235b-a22b").experts == (Experts(128, 1536, 8),)
    switch = of("switch-base-8")
    assert (switch.hidden, switch.experts) == ((3072,), (Experts(8, 3072, 1),))


def test_latent_attention_and_a_shared_expert() -> None:
    found = of("deepseek-v3")
    assert (found.heads, found.latent, found.kv_heads, found.head_dim) == ((128,), (512 + 64,), (), ())
    assert (found.hidden, found.shared, found.experts) == ((18_432,), (2048,), (Experts(256, 2048, 8),))


def test_a_recurrence_has_no_heads_and_no_feed_forward() -> None:
    found = of("mamba-130m")
    assert (found.width, found.recurrences, found.heads, found.hidden, found.positions) == (
        (768,), ("selective_scan",), (), (), (),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "positions"),
    [
        ("llama2-7b", "RoPE, base 10,000"),
        ("llama3.1-8b", "RoPE, base 500,000, llama3 × 8"),
        ("deepseek-v3", "RoPE, base 10,000, yarn × 40"),
        ("gpt2", "learned"),
        ("transformer-base", "sinusoidal"),
        ("t5-base", "relative"),
    ],
)
def test_position_encodings_of_presets(preset: str, positions: str) -> None:
    assert of(preset).positions == (positions,)


def test_mixed_layers_list_each_size_once() -> None:
    norm = RMSNorm()
    mixed = [
        Block(Attention(4, 2, bias=ALiBi(), window=16), GatedMLP(48), norm),
        Block(LinearAttention(4), MoE(4, 24, 2, shared=GatedMLP(40)), norm),
        Block(Mamba(64), GatedMLP(56), norm),
    ]
    found = find_dimensions(Decoder(50, 32, mixed * 2).graph())
    assert found == Dimensions(
        width=(32,),
        heads=(4,),
        kv_heads=(2,),
        head_dim=(8,),
        latent=(),
        windows=(16,),
        recurrences=("linear_attention", "selective_scan"),
        hidden=(48, 56),
        shared=(40,),
        experts=(Experts(4, 24, 2),),
        positions=("ALiBi",),
    )


def test_passes_keep_dimensions() -> None:
    graph = load_source("smollm2-135m").graph
    before = find_dimensions(graph)
    assert find_dimensions(run_passes(graph, "pack-qkv, pack-gate-up, fuse-norm-linear")) == before


def test_graph_without_layers_has_no_dimensions() -> None:
    from weft import trace

    found = find_dimensions(trace(relu, {"x": TensorType(dtypes.f32, (2, 3))}))
    assert not any(vars(found).values())

"""Published architectures by name, with their published sizes; weights are the declared random initialization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .dsl import (
    MLP,
    Attention,
    Block,
    Decoder,
    Encoder,
    GatedMLP,
    LayerNorm,
    LearnedPositions,
    RMSNorm,
    RoPE,
)


@dataclass(frozen=True)
class Preset:
    """An architecture: how to make it, what it is, and how many parameters it has."""

    model: Callable[[], Decoder | Encoder]
    about: str
    parameters: int


def _llama(
    vocab: int,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    rope: RoPE,
    context: int,
    eps: float = 1e-5,
    tie: bool = False,
    window: int | None = None,
    qkv_bias: bool = False,
) -> Decoder:
    attn = Attention(heads, kv_heads, rope=rope, window=window, qkv_bias=qkv_bias)
    return Decoder(vocab, dim, layers, Block(attn, GatedMLP(ffn), RMSNorm(eps)), tie_embeddings=tie, context=context)


def _gpt(vocab: int, dim: int, layers: int, heads: int, context: int) -> Decoder:
    attn = Attention(heads, qkv_bias=True, out_bias=True)
    block = Block(attn, MLP(4 * dim, "gelu_tanh", bias=True), LayerNorm(1e-5))
    return Decoder(vocab, dim, layers, block, tie_embeddings=True, positions=LearnedPositions(context))


def _bert(dim: int, layers: int, heads: int, pooler: bool = True) -> Encoder:
    attn, norm = Attention(heads, qkv_bias=True, out_bias=True), LayerNorm(1e-12)
    block = Block(attn, MLP(4 * dim, "gelu", bias=True), norm, arrangement="post")
    return Encoder(30_522, dim, layers, block, LearnedPositions(512), token_types=2, embed_norm=norm, pooler=pooler)


LLAMA31 = RoPE(500_000, scaling="llama3", factor=8, original=8192, low_freq=1, high_freq=4)


PRESETS: dict[str, Preset] = {
    "gpt2": Preset(lambda: _gpt(50_257, 768, 12, 12, 1024), "GPT-2 small (Radford 2019)", 124_439_808),
    "bert-base": Preset(lambda: _bert(768, 12, 12), "BERT base, uncased (Devlin 2018)", 109_482_240),
    "all-minilm-l6-v2": Preset(lambda: _bert(384, 6, 12), "sentence encoder all-MiniLM-L6-v2", 22_713_216),
    "smollm2-135m": Preset(
        lambda: _llama(49_152, 576, 30, 9, 3, 1536, RoPE(100_000), 8192, tie=True), "SmolLM2 135M", 134_515_008
    ),
    "llama2-7b": Preset(
        lambda: _llama(32_000, 4096, 32, 32, 32, 11_008, RoPE(), 4096), "Llama 2 7B (Touvron 2023)", 6_738_415_616
    ),
    "llama2-70b": Preset(lambda: _llama(32_000, 8192, 80, 64, 8, 28_672, RoPE(), 4096), "Llama 2 70B", 68_976_648_192),
    "llama3.1-8b": Preset(
        lambda: _llama(128_256, 4096, 32, 32, 8, 14_336, LLAMA31, 131_072), "Llama 3.1 8B", 8_030_261_248
    ),
    "llama3.1-70b": Preset(
        lambda: _llama(128_256, 8192, 80, 64, 8, 28_672, LLAMA31, 131_072), "Llama 3.1 70B", 70_553_706_496
    ),
    "llama3.1-405b": Preset(
        lambda: _llama(128_256, 16_384, 126, 128, 8, 53_248, LLAMA31, 131_072), "Llama 3.1 405B", 405_853_388_800
    ),
    "mistral-7b": Preset(
        lambda: _llama(32_000, 4096, 32, 32, 8, 14_336, RoPE(), 32_768, window=4096),
        "Mistral 7B v0.1 (Jiang 2023)",
        7_241_732_096,
    ),
    "qwen2.5-3b": Preset(
        lambda: _llama(*(151_936, 2048, 36, 16, 2, 11_008, RoPE(1e6), 32_768), eps=1e-6, tie=True, qkv_bias=True),
        "Qwen2.5 3B",
        3_085_938_688,
    ),
}

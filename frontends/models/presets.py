"""Presets: published architectures by name, with their published sizes and randomly initialized weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..dsl import (
    MLA,
    MLP,
    Attention,
    Block,
    CrossAttention,
    Decoder,
    Encoder,
    EncoderDecoder,
    GatedMLP,
    LayerNorm,
    LearnedPositions,
    Mamba,
    MoE,
    RMSNorm,
    RoPE,
    Router,
    Sinusoidal,
    T5Bias,
)


@dataclass(frozen=True)
class Preset:
    """An architecture: `model` builds its module, `about` describes it, `parameters` is its number of parameters."""

    model: Callable[[], Decoder | Encoder | EncoderDecoder]
    about: str
    parameters: int


def _transformer(vocab: int, dim: int, layers: int, heads: int, ffn: int) -> EncoderDecoder:
    """Return the Transformer of Vaswani 2017, limited to 1024 positions; the paper has no limit."""
    attn, feed, norm = Attention(heads), MLP(ffn, "relu", bias=True), LayerNorm(1e-6)
    block = Block(attn, feed, norm, "post")
    cross = Block(attn, feed, norm, "post", cross=CrossAttention(heads))
    shape, positions, scale = (vocab, dim, layers), Sinusoidal(1024), math.sqrt(dim)
    return EncoderDecoder(
        Encoder(*shape, block, positions, embed_scale=scale),
        Decoder(*shape, cross, tie_embeddings=True, positions=positions, embed_scale=scale),
    )


def _t5(ffn: Sequence[Any], tie: bool = True) -> EncoderDecoder:
    """Return T5 base with one feed-forward of `ffn` per layer; with `tie`, logits are scaled by 1/√dim."""
    attn, cross, norm = Attention(12, scale=1.0), CrossAttention(12, scale=1.0), RMSNorm(1e-6)
    shared: dict[str, Any] = {"position_bias": T5Bias(heads=12), "context": 512}
    decoder = [Block(attn, f, norm, cross=cross) for f in ffn]
    return EncoderDecoder(
        Encoder(32_128, 768, [Block(attn, f, norm) for f in ffn], final_norm=norm, **shared),
        Decoder(32_128, 768, decoder, tie_embeddings=tie, logit_scale=768**-0.5 if tie else 1.0, **shared),
    )


def _gpt(dim: int, layers: int, heads: int, context: int, windows: Sequence[int | None] = (None,)) -> Decoder:
    """Return GPT-2 or GPT-3; layer i has the window windows[i % len(windows)] (None: full attention)."""
    feed, norm = MLP(4 * dim, "gelu_tanh", bias=True), LayerNorm(1e-5)
    blocks = [Block(Attention(heads, window=w, qkv_bias=True, out_bias=True), feed, norm) for w in windows]
    stack = blocks * (layers // len(blocks))
    return Decoder(50_257, dim, stack, tie_embeddings=True, positions=LearnedPositions(context))


def _bert(dim: int, layers: int, heads: int) -> Encoder:
    attn, norm = Attention(heads, qkv_bias=True, out_bias=True), LayerNorm(1e-12)
    block = Block(attn, MLP(4 * dim, "gelu", bias=True), norm, arrangement="post")
    return Encoder(30_522, dim, layers, block, LearnedPositions(512), token_types=2, embed_norm=norm, pooler=True)


def _llama(
    vocab: int,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int | MoE,
    rope: RoPE,
    context: int,
    eps: float = 1e-5,
    tie: bool = False,
    **attention: Any,
) -> Decoder:
    """Return Llama with other settings: `attention` are arguments of `Attention`, `ffn` is a width or experts."""
    attn = Attention(heads, kv_heads, rope=rope, **attention)
    block = Block(attn, GatedMLP(ffn) if isinstance(ffn, int) else ffn, RMSNorm(eps))
    return Decoder(vocab, dim, layers, block, tie_embeddings=tie, context=context)


def _qwen3(dim: int, layers: int, heads: int, hidden: int) -> Decoder:
    shape, experts = (151_936, dim, layers, heads, 4), MoE(128, hidden, 8)
    return _llama(*shape, experts, RoPE(1e6), 40_960, eps=1e-6, head_dim=128, qk_norm=RMSNorm(1e-6))


def _deepseek_v3() -> Decoder:
    """Return DeepSeek-V3: 61 layers, the first 3 dense; YaRN extends the context 40-fold and changes the scale."""
    rope = RoPE(10_000, interleaved=True, scaling="yarn", factor=40, original=4096)
    temperature = (0.1 * math.log(40) + 1) ** 2
    attn = MLA(128, 512, 128, 64, 128, rope, q_rank=1536, scale=temperature / math.sqrt(192))
    router = Router(scoring="sigmoid", correction=True, groups=8, top_groups=4, scale=2.5)
    experts = MoE(256, 2048, 8, router=router, shared=GatedMLP(2048))
    layers = [Block(attn, GatedMLP(18_432))] * 3 + [Block(attn, experts)] * 58
    return Decoder(129_280, 7168, layers, context=163_840)


def _mamba(dim: int, layers: int) -> Decoder:
    return Decoder(50_280, dim, layers, Block(Mamba(2 * dim), norm=RMSNorm(1e-5)), tie_embeddings=True)


LLAMA31 = RoPE(500_000, scaling="llama3", factor=8, original=8192, low_freq=1, high_freq=4)
RELU = MLP(3072, "relu")
SWITCH = MoE(8, 3072, 1, "relu", gated=False, router=Router(renormalize=False, capacity=64))

PRESETS: dict[str, Preset] = {
    "transformer-base": Preset(
        lambda: _transformer(37_000, 512, 6, 8, 2048), "the Transformer (Vaswani 2017), base", 63_045_632
    ),
    "gpt2": Preset(lambda: _gpt(768, 12, 12, 1024), "GPT-2 small (Radford 2019)", 124_439_808),
    "gpt3-175b": Preset(
        lambda: _gpt(12_288, 96, 96, 2048, windows=(None, 256)),
        "GPT-3 (Brown 2020), alternating dense and banded layers; the band's width is not published, here 256",
        174_604_259_328,
    ),
    "bert-base": Preset(lambda: _bert(768, 12, 12), "BERT base, uncased (Devlin 2018)", 109_482_240),
    "all-minilm-l6-v2": Preset(lambda: _bert(384, 6, 12), "sentence encoder all-MiniLM-L6-v2", 22_713_216),
    "t5-base": Preset(lambda: _t5([RELU] * 12), "T5 base (Raffel 2020)", 222_903_552),
    "t5-v1.1-base": Preset(
        lambda: _t5([GatedMLP(2048, "gelu_tanh")] * 12, tie=False), "T5 v1.1 base, GEGLU", 247_577_856
    ),
    "switch-base-8": Preset(
        lambda: _t5([RELU, SWITCH] * 6), "Switch Transformer, T5 base with 8 experts (Fedus 2021)", 619_339_008
    ),
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
    "mixtral-8x7b": Preset(
        lambda: _llama(32_000, 4096, 32, 32, 8, MoE(8, 14_336, 2), RoPE(1e6), 32_768),
        "Mixtral 8x7B v0.1 (Jiang 2024)",
        46_702_792_704,
    ),
    "qwen2.5-3b": Preset(
        lambda: _llama(*(151_936, 2048, 36, 16, 2, 11_008, RoPE(1e6), 32_768), eps=1e-6, tie=True, qkv_bias=True),
        "Qwen2.5 3B",
        3_085_938_688,
    ),
    "qwen3-30b-a3b": Preset(lambda: _qwen3(2048, 48, 32, 768), "Qwen3 30B-A3B", 30_532_122_624),
    "qwen3-235b-a22b": Preset(lambda: _qwen3(4096, 94, 64, 1536), "Qwen3 235B-A22B", 235_093_634_560),
    "deepseek-v3": Preset(
        _deepseek_v3, "DeepSeek-V3 (2024) without the layer that predicts one more token", 671_026_404_352
    ),
    "mamba-130m": Preset(lambda: _mamba(768, 24), "Mamba 130M (Gu & Dao 2023)", 129_135_360),
    "mamba-370m": Preset(lambda: _mamba(1024, 48), "Mamba 370M", 371_516_416),
    "mamba-790m": Preset(lambda: _mamba(1536, 48), "Mamba 790M", 793_204_224),
    "mamba-1.4b": Preset(lambda: _mamba(2048, 48), "Mamba 1.4B", 1_372_178_432),
    "mamba-2.8b": Preset(lambda: _mamba(2560, 64), "Mamba 2.8B", 2_768_345_600),
}

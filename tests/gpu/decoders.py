"""Small decoders of every kind that the tests of this folder compile for a GPU."""

from __future__ import annotations

from typing import Any

from weft.frontends.dsl import (
    MLP,
    RGLRU,
    Attention,
    Block,
    Decoder,
    GatedDeltaNet,
    GatedMLP,
    LayerNorm,
    LearnedPositions,
    LightningAttention,
    MoE,
    RMSNorm,
    Router,
    RWKV7TimeMix,
)
from weft.frontends.dsl import RoPE as Rope

VOCAB, DIM, LAYERS, LENGTH = 1000, 256, 4, 2048
ROPE = Rope(1e4)


def decoder(attention: Any, ffn: Any = None, norm: Any = None, **settings: Any) -> Decoder:
    block = Block(attention, ffn or GatedMLP(512), norm or RMSNorm(1e-5))
    return Decoder(VOCAB, DIM, LAYERS, block, **{"context": LENGTH, "tie_embeddings": True, **settings})


DECODERS = {
    "grouped": decoder(Attention(4, 2, rope=ROPE)),
    "head-norms": decoder(Attention(4, 2, rope=ROPE, qk_norm=RMSNorm(1e-6))),
    "biases": decoder(Attention(4, 2, rope=ROPE, qkv_bias=True, out_bias=True), tie_embeddings=False),
    "window": decoder(Attention(4, 2, rope=ROPE, window=64)),
    "softcap": decoder(Attention(4, 2, rope=ROPE, softcap=20.0), logit_softcap=20.0),
    "sinks": decoder(Attention(4, 2, rope=ROPE, sinks=True), GatedMLP(512, "swish(1.702)", limit=7.0)),
    "interleaved": decoder(Attention(4, 2, rope=Rope(1e4, interleaved=True))),
    "half-rotated": decoder(Attention(4, 2, rope=Rope(1e4, fraction=0.5))),
    "head-of-128": decoder(Attention(4, 1, head_dim=128, rope=ROPE)),
    "head-of-12": decoder(Attention(4, 2, head_dim=12, rope=ROPE)),  # the standard operator, not GroupQueryAttention
    # Every token asks all experts: which two are best, 16 bits may see otherwise.
    "experts": decoder(Attention(4, 2, rope=ROPE), MoE(8, 128, 8)),
    "experts by sigmoid": decoder(
        Attention(4, 2, rope=ROPE), MoE(8, 128, 8, shared=GatedMLP(64), router=Router(scoring="sigmoid"))
    ),
    "experts with limits": decoder(
        Attention(4, 2, rope=ROPE), MoE(8, 128, 8, "swish(1.702)", bias=True, limit=7.0, shift=1.0)
    ),
    "experts in one product": decoder(Attention(4, 2, rope=ROPE), MoE(8, 128, 8, "gelu")),
    "learned": decoder(Attention(4), MLP(512, "gelu_tanh", bias=True), LayerNorm(), positions=LearnedPositions(LENGTH)),
}
RECURRENT = {  # those whose steps change a state, the last two by a generated kernel
    "delta rule": decoder(GatedDeltaNet(4, 64, groups=2)),
    "delta rule by key": decoder(GatedDeltaNet(4, 64, 48, gate="sigmoid", per_key=True, rank=32)),
    "lightning": decoder(LightningAttention(4)),
    "rg-lru": decoder(RGLRU(4, 320)),
    "rwkv-7": decoder(RWKV7TimeMix(4, 32, 32, 32, keep_values="v")),
}

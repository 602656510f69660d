"""The flat vocabulary that families are described in, and the one place that turns it into a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from weft.ir.errors import WeftError

from ..dsl import (
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

# Activations by their names in configs.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "quick_gelu": "gelu_quick",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}


@dataclass(frozen=True)
class Settings:
    """A transformer in numbers; defaults are the plain Llama. `window` and `scale` may say one value per layer."""

    vocab: int
    dim: int
    layers: int
    heads: int
    ffn: int
    kv_heads: int | None = None
    head_dim: int | None = None
    context: int | None = None
    kind: str = "decoder"
    norm: str = "rms"
    eps: float = 1e-6
    arrangement: str = "pre"
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    qk_norm: str = "none"  # none, head, full
    rope: RoPE | None = None
    window: int | tuple[int | None, ...] | None = None
    scale: float | tuple[float | None, ...] | None = None
    tie: bool = False
    learned_positions: int | None = None
    token_types: int = 0
    embed_norm: bool = False
    pooler: bool = False


def build(s: Settings) -> Decoder | Encoder:
    """The model that settings describe.

    Raises:
        WeftError: naming the setting that is unknown or does not fit.
    """
    if s.activation not in ACTIVATIONS:
        raise WeftError(f"unknown activation {s.activation!r}; known are {', '.join(ACTIVATIONS)}")
    for name in ("vocab", "dim", "layers", "heads", "ffn"):
        if getattr(s, name) < 1:
            raise WeftError(f"{name}={getattr(s, name)} must be positive")
    norm = RMSNorm(s.eps) if s.norm == "rms" else LayerNorm(s.eps)
    ffn = (GatedMLP if s.gated else MLP)(s.ffn, ACTIVATIONS[s.activation], s.ffn_bias)
    attention = Attention(
        heads=s.heads,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        rope=s.rope,
        qkv_bias=s.qkv_bias,
        out_bias=s.out_bias,
        qk_norm=None if s.qk_norm == "none" else norm,
        qk_norm_full=s.qk_norm == "full",
    )
    blocks = [
        Block(replace(attention, window=window, scale=scale), ffn, norm, s.arrangement)
        for window, scale in zip(_each(s.window, s.layers), _each(s.scale, s.layers), strict=True)
    ]
    alike = all(b == blocks[0] for b in blocks)
    layers, block = (s.layers, blocks[0]) if alike else (blocks, None)
    positions = LearnedPositions(s.learned_positions) if s.learned_positions else None
    embed_norm = norm if s.embed_norm else None
    if s.kind == "encoder":
        return Encoder(
            s.vocab,
            s.dim,
            layers,
            block,
            positions,
            s.token_types,
            embed_norm,
            final_norm=None if s.arrangement == "post" else norm,
            pooler=s.pooler,
            context=s.context,
        )
    return Decoder(
        s.vocab,
        s.dim,
        layers,
        block,
        tie_embeddings=s.tie,
        positions=positions,
        embed_norm=embed_norm,
        context=s.context,
    )


def _each(value: Any, layers: int) -> tuple[Any, ...]:
    found = value if isinstance(value, tuple) else (value,) * layers
    if len(found) != layers:
        raise WeftError(f"{len(found)} layer types are given for {layers} layers")
    return found

"""The declarative language: modules whose fields are the specification and whose calls emit ops.

A module's parameters appear by name in the scope that asks for them, sizes are inferred, and every op of `weft.ir.ops`
may be used beside the building blocks: ``from weft.frontends.dsl import linear, module, relu, square``.
"""

from typing import Any

from weft.ir import ops

from .attention import Attention
from .blocks import Block
from .build import building, fill, module, named, normal, param, provided, providing, scope, trace
from .ffn import MLP, GatedMLP
from .layers import LayerNorm, LearnedPositions, RMSNorm, Sinusoidal, embedding, linear, positions
from .models import Decoder, Encoder
from .rotary import RoPE
from .seq2seq import CrossAttention, EncoderDecoder

silu = ops.swish  # its β is 1 by default

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "CrossAttention",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "GatedMLP",
    "LayerNorm",
    "LearnedPositions",
    "RMSNorm",
    "RoPE",
    "Sinusoidal",
    "building",
    "embedding",
    "fill",
    "linear",
    "module",
    "named",
    "normal",
    "param",
    "positions",
    "provided",
    "providing",
    "scope",
    "silu",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'weft.frontends.dsl' has no attribute {name!r}")
    return getattr(ops, name)

"""A decoder with RoPE and a gated MLP."""

from __future__ import annotations

from weft.frontends.dsl import Attention, Block, Decoder, GatedMLP, RoPE
from weft.ir import Graph

ATTENTION = Attention(4, 2, rope=RoPE(), qkv_bias=True)


BLOCK = Block(ATTENTION, GatedMLP(9))


def decoder(**settings: object) -> Graph:
    return Decoder(37, 16, 2, BLOCK, **settings).graph()

"""Decoders of four attentions, or of given mixers."""

from __future__ import annotations

from typing import Any

from weft import Attention, Block, Decoder, GatedMLP, RoPE
from weft.ir import Graph

FEED = GatedMLP(11)


def decoder(*mixers: Any, **settings: Any) -> Graph:
    """Layers with these mixers; four of two heads if there are none."""
    layers = [Block(m, FEED) for m in mixers or [Attention(2, rope=RoPE())] * 4]
    return Decoder(19, 8, layers, **settings).graph()

"""Small models with and without positions, to operate on."""

from __future__ import annotations

from typing import Any

from weft import Attention, Block, Decoder, Encoder, GatedMLP, RoPE
from weft.ir import Graph
from weft.ir.recipes.frequencies import RopeFrequencies

FEED, ROPE = GatedMLP(11), RoPE()


def decoder(mixer: Any = None, **settings: Any) -> Graph:
    """Two layers; attention without positions unless `mixer` says more."""
    return Decoder(19, 16, 2, Block(mixer or Attention(2), FEED), **settings).graph()


def encoder(mixer: Any = None, **settings: Any) -> Graph:
    return Encoder(19, 16, 2, Block(mixer or Attention(2), FEED), **settings).graph()


def rotary(**settings: Any) -> Graph:
    return decoder(Attention(2, rope=RoPE(**settings)), context=12)


def recipes(graph: Graph) -> list[RopeFrequencies]:
    return [p.recipe for p in graph.params.values() if isinstance(p.recipe, RopeFrequencies)]

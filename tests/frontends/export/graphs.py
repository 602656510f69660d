"""Small decoders to compare and to infer settings from."""

from __future__ import annotations

from typing import Any

from weft.frontends.dsl import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.frontends.models.families import Settings
from weft.ir import Graph


def decoder(**changes: Any) -> Graph:
    attention = {"heads": 4, "kv_heads": 2, "rope": RoPE(), **changes.pop("attention", {})}
    norm = changes.pop("norm", RMSNorm())
    ffn = changes.pop("ffn", GatedMLP(24))
    block = Block(Attention(**attention), ffn, norm, **changes.pop("block", {}))
    return Decoder(vocab=17, dim=16, layers=changes.pop("layers", 2), block=block, **changes).graph()


SETTINGS = Settings(vocab=17, dim=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=24, context=64, rope=RoPE())

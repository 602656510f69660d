"""Stacks of layers with every kind of cache and state, as models, prompts and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import weft
from weft import Attention, Block, Decoder, GatedMLP, Mask, RMSNorm, RoPE
from weft.backends.runtime.core.generation import Generator
from weft.frontends.dsl import MLA, LinearAttention, Mamba, Mamba2

VOCAB = 61
NORM = RMSNorm(1e-6)


def block(mixer: Any) -> Block:
    return Block(mixer, GatedMLP(48), norm=NORM)


ROPED = {"heads": 4, "kv_heads": 2, "rope": RoPE(100.0)}
LOCAL, WIDE = block(Attention(**ROPED, window=8)), block(Attention(**ROPED))
KEEPING = block(Attention(**ROPED, window=6, mask=Mask(keep_first=2)))
SCAN, LINEAR = block(Mamba(64, state=4)), block(LinearAttention(heads=4))
DUAL = block(Mamba2(64, heads=4, state=8))
LATENT = block(MLA(heads=4, rank=16, head_dim=8, rope_dim=8, v_head_dim=8, rope=RoPE(100.0)))
STACKS = {
    "rolling": [LOCAL, LOCAL],
    "local-global": [LOCAL, WIDE, LOCAL],
    "rolling, first keys": [KEEPING, KEEPING],
    "latent": [LATENT, LATENT],
    "recurrent": [SCAN, DUAL],
    "linear": [LINEAR, LINEAR],
    "hybrid": [SCAN, LOCAL, LINEAR, WIDE],
}
CAREFUL = {
    "rolling",
    "local-global",
    "rolling, first keys",
    "recurrent",
    "linear",
    "hybrid",
}  # those that must never see padding
PROMPTS = [[5, 9, 33, 2, 60, 7, 11], [1], [40, 41, 42], [3, 2, 1], list(range(20, 41))]


def stack(name: str) -> Decoder:
    return Decoder(vocab=VOCAB, dim=32, layers=STACKS[name], context=300)


def opened(folder: Path) -> Generator:
    model = weft.load(folder, threads=1)
    assert isinstance(model, Generator)
    return model


def tokens(results: list[Any]) -> list[list[int]]:
    return [result.tokens for result in results]

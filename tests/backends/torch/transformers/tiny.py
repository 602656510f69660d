"""Tiny models lowered for transformers in this process, without a folder: each once per session, not to be changed."""

from __future__ import annotations

from functools import cache

from weft import MLP, ALiBi, Attention, Block, Decoder, Encoder, GatedMLP, Mamba, MoE, RMSNorm, RoPE
from weft.backends.torch.transformers.engines.plans import Plans, make_plans
from weft.backends.torch.transformers.lower.lower_base_and_head import LoweredModel, lower_sides
from weft.backends.torch.transformers.modeling.base import BaseModel
from weft.backends.torch.transformers.modeling.modeling_file import ModelingFile, write_modeling
from weft.ir import Graph

from ....lowered import forms

DIM, HEADS, KV, HEAD, FFN, VOCAB = 32, 8, 4, 4, 48, 60
ATTENTION = Attention(HEADS, KV, head_dim=HEAD, rope=RoPE())
LOCAL = Attention(HEADS, KV, head_dim=HEAD, rope=RoPE(), window=3)
MODELS = {
    "dense": Decoder(VOCAB, DIM, 3, Block(ATTENTION, GatedMLP(FFN), RMSNorm())),
    "single": Decoder(VOCAB, DIM, 1, Block(ATTENTION, GatedMLP(FFN), RMSNorm())),
    "tied": Decoder(VOCAB, DIM, 2, Block(ATTENTION, GatedMLP(FFN), RMSNorm()), tie_embeddings=True),
    "windows": Decoder(VOCAB, DIM, [Block(a, GatedMLP(FFN), RMSNorm()) for a in (LOCAL, LOCAL, ATTENTION)]),
    "experts": Decoder(VOCAB, DIM, 2, Block(ATTENTION, MoE(8, 16, 2), RMSNorm())),
    "mamba": Decoder(VOCAB, DIM, 2, Block(Mamba(DIM, state=4), norm=RMSNorm())),
    "alibi": Decoder(VOCAB, DIM, 2, Block(Attention(HEADS, bias=ALiBi()), MLP(FFN), RMSNorm())),
    "encoder": Encoder(VOCAB, DIM, 2, Block(Attention(HEADS, causal=False), MLP(FFN), RMSNorm())),
}


@cache
def graph_of(name: str) -> Graph:
    return MODELS[name].graph(name=name)


def lower_model(name: str) -> LoweredModel:
    """Return a model newly lowered, so that a test may change it."""
    return lower_sides(forms(graph_of(name), "transformers"))[0]


@cache
def modeling_of(name: str) -> ModelingFile:
    return write_modeling([lower_model(name)], "Tiny", "tiny")


def base_of(name: str) -> BaseModel:
    return modeling_of(name).bases[0]


@cache
def plans_of(name: str) -> Plans:
    return make_plans([base_of(name)])

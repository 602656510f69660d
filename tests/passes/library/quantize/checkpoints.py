"""Small models with weights of a checkpoint in memory."""

from __future__ import annotations

import numpy as np

import weft
from weft.ir import Graph, MemoryReader
from weft.ir.recipes import Source
from weft.ir.recipes.readers import Array
from weft.passes.fitting.matrices import Matrix, find_matrices

VOCAB, USED = 97, 12  # tokens, and those of the texts: what they make spans few directions


def model(tied: bool = False) -> Graph:
    """A small decoder with weights of a checkpoint in memory."""
    block = weft.Block(weft.Attention(4, kv_heads=2, rope=weft.RoPE()), weft.GatedMLP(96), weft.RMSNorm())
    graph = weft.Decoder(VOCAB, 48, 2, block, context=64, tie_embeddings=tied).graph()
    return in_memory(graph)


def mixture() -> Graph:
    block = weft.Block(weft.Attention(4, rope=weft.RoPE()), weft.MoE(experts=4, k=2, hidden=32), weft.RMSNorm())
    return in_memory(weft.Decoder(VOCAB, 48, 2, block, context=64).graph())


def in_memory(graph: Graph) -> Graph:
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {}
    for name, param in graph.params.items():
        if not param.recipe.is_constant:
            shape = param.type.concrete({})
            spread = np.exp(rng.standard_normal(shape[-1]))  # some inputs matter more than others
            arrays[name] = (rng.standard_normal(shape) * spread / np.sqrt(shape[-1])).astype(np.float32)
            if len(shape) == 1:
                arrays[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
            param.recipe = Source(name)
    graph.reader = MemoryReader(arrays)
    return graph


def kinds(graph: Graph) -> dict[str, str]:
    return {p.name: m.kind if isinstance(m, Matrix) else m for p, m in find_matrices(graph).items()}
